// A device in host memory, registered as torch's PrivateUse1 backend. Its tensors are told apart from host tensors as
// those of a GPU are: operators refuse to mix them, generators belong to one of them, a backward pass runs on the
// device's own autograd thread. Operators are computed by copies to the host and back (at::native::cpu_fallback).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <map>
#include <mutex>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device device0(kDevice, 0);
const c10::DispatchKeySet device_keys(c10::DispatchKey::PrivateUse1);

struct StandinAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::GetDefaultCPUAllocator()->raw_allocate(bytes);
    return {memory, memory, &release, device0};
  }
  static void release(void* memory) { c10::GetDefaultCPUAllocator()->raw_deallocate(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
StandinAllocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

// Host memory that counts as pinned: all that this has handed out.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    char* memory = static_cast<char*>(c10::GetDefaultCPUAllocator()->raw_allocate(bytes));
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes > 0) ends[memory] = memory + bytes;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ends.erase(static_cast<char*>(memory));
    }
    c10::GetDefaultCPUAllocator()->raw_deallocate(memory);
  }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto next = ends.upper_bound(static_cast<const char*>(address));
    return next != ends.begin() && address < std::prev(next)->second;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  static inline std::mutex mutex;
  static inline std::map<const char*, const char*> ends;
};
PinnedAllocator pinned_allocator;

struct StandinGuard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return device0; }
  c10::Device getDevice() const override { return device0; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device0); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device0); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, StandinGuard);

struct StandinGenerator final : at::CPUGeneratorImpl {
  StandinGenerator() {
    device_ = device0;
    key_set_ = device_keys;
  }
};

const at::Generator& default_generator() {
  static const at::Generator generator = at::make_generator<StandinGenerator>();
  return generator;
}

struct StandinHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return device0; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::holds(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<StandinGenerator>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, device_keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, device_keys, c10::dtype_or_default(dtype));
}

// The same memory as a host tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::native::_local_scalar_dense_cpu(on_host(tensor)); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {length}, {1});
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true));
}

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;  // computed by matrix products
}

using Sizes = at::IntArrayRef;
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, Sizes stride,
                       Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, int64_t groups) {
  const auto added = bias.has_value() ? std::optional(on_host(*bias)) : std::nullopt;
  return at::convolution(on_host(x), on_host(weight), added, stride, padding, dilation, transposed, output_padding, groups)
      .to(device0);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, int64_t groups, std::array<bool, 3> mask) {
  const auto to_device = [](const at::Tensor& t) { return t.defined() ? t.to(device0) : t; };
  const Sizes bias(weight.sizes().data() + (transposed ? 1 : 0), 1);
  const auto [a, b, c] = at::convolution_backward(on_host(grad), on_host(x), on_host(weight), bias, stride, padding,
                                                  dilation, transposed, output_padding, groups, mask);
  return {to_device(a), to_device(b), to_device(c)};
}

// The cells of recurrent layers, which torch leaves to one kernel on devices like this one. A workspace has what the
// backward pass needs.
using OptionalTensor = std::optional<at::Tensor>;
at::Tensor add_bias(const at::Tensor& gates, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& x, const at::Tensor& h, const at::Tensor& cx,
                                                         const OptionalTensor& x_bias, const OptionalTensor& h_bias) {
  const auto gates = (add_bias(x, x_bias) + add_bias(h, h_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const OptionalTensor& grad_hy, const OptionalTensor& grad_cy, const at::Tensor& cx, const at::Tensor& cy,
    const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(4, 1);
  const auto &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const auto zeros = at::zeros_like(cx), turned = cy.tanh();
  const auto grad_h = grad_hy.has_value() && grad_hy->defined() ? *grad_hy : zeros;
  const auto grad_c = grad_h * out * (1 - turned * turned) +
                      (grad_cy.has_value() && grad_cy->defined() ? *grad_cy : zeros);
  const auto gates = at::cat({grad_c * cell * in * (1 - in), grad_c * cx * forget * (1 - forget),
                              grad_c * in * (1 - cell * cell), grad_h * turned * out * (1 - out)}, 1);
  return {gates, grad_c * forget, has_bias ? gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& x, const at::Tensor& h, const at::Tensor& hx,
                                            const OptionalTensor& x_bias, const OptionalTensor& h_bias) {
  const auto ours = add_bias(x, x_bias).chunk(3, 1), theirs = add_bias(h, h_bias).chunk(3, 1);
  const auto reset = (ours[0] + theirs[0]).sigmoid(), update = (ours[1] + theirs[1]).sigmoid();
  const auto fresh = (ours[2] + reset * theirs[2]).tanh();
  return {fresh + update * (hx - fresh), at::cat({reset, update, fresh, hx, theirs[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad, const at::Tensor& workspace, bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
  const auto grad_update = grad * (hx - fresh) * update * (1 - update);
  const auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const auto grad_reset = grad_fresh * hidden * reset * (1 - reset);
  const auto ours = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto theirs = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  return {ours, theirs, grad * update, has_bias ? ours.sum(0) : at::Tensor(), has_bias ? theirs.sum(0) : at::Tensor()};
}

// Writes to the running statistics, which its schema does not say.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& x, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& var, bool training, double momentum, double eps) {
  const auto host = [](const std::optional<at::Tensor>& t) { return t ? std::optional(on_host(*t)) : std::nullopt; };
  const auto [a, b, c] = at::native_batch_norm(on_host(x), host(weight), host(bias), host(mean), host(var), training, momentum, eps);
  return {a.to(device0), b.to(device0), c.to(device0)};
}

// Operators that take host tensors of indices beside device tensors, as those of CUDA do.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
}

void count_devices(const at::Tensor& tensor, bool& host, bool& device) {
  if (!tensor.defined()) return;
  device = device || !tensor.is_cpu();
  host = host || (tensor.is_cpu() && tensor.dim() > 0);  // a host tensor of one number is taken as that number
}

void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool host = false, device = false;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) count_devices(value.toTensor(), host, device);
    if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) count_devices(t, host, device);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) if (t) count_devices(*t, host, device);
  }
  TORCH_CHECK(!(host && device) || takes_host_indices(op.schema().name()),
              "Expected all tensors to be on the same device, but found at least two devices, standin:0 and cpu! (",
              op.schema().name(), ")");
}

// Compute on the host. A generator of the device lends its state to one of the host.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, *stack);
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    auto source = value.isNone() ? default_generator() : value.toGenerator();
    TORCH_CHECK(source.device().type() == kDevice, "Expected a 'standin' device type for generator but found 'cpu'");
    std::lock_guard<std::mutex> lock(source.mutex());
    auto host = at::detail::createCPUGenerator();
    host.set_state(source.get_state());
    value = host;
    at::native::cpu_fallback(op, stack, true);
    source.set_state(host.get_state());
    return;
  }
  at::native::cpu_fallback(op, stack, true);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_", &set_empty);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());  // torch's own steps for these
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());  // resize their result
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
}

// A copy reads conjugated and negated tensors as they are.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new StandinHooks());
  m.def("default_generator", [] { return default_generator(); });
}
