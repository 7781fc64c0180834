"""Which statements can a random program hold? Templates, in three tables by what they do to exact numbers.

A row is a constraint on the first tensor and a template. The constraint is a class of dtypes, then the least number of
dims ("num2") or the very number ("real=3"). Fields of a template are drawn from left to right (`generate.py`):

    {x} the first tensor        {y} {z} tensors of its shape and dtype     {b} one that broadcasts to it
    {d} {e} dims of it          {k} a number within dim d                  {n} a small number   {f} a fraction
    {mask} booleans             {index} {scatter} indices into dim d       {m} {w} {row} partners of a product
    {t} {u} the names of results; a row without them has one result, and none if it starts with "!"
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Exact where the tensors that go in are exact.
EXACT = """
num    torch.add({x}, {b})
num    torch.add({x}, {b}, alpha={n})
num    {x} + {b}
num    {b} - {x}
num    {x} - {b}
num    {x} * {b}
num    {x} * {x}
num    {x} * {n}
num    {n} - {x}
num    torch.addcmul({x}, {y}, {b})
num    -{x}
num    torch.abs({x})
num    torch.square({x})
num    {x} ** 2
real   F.relu({x})
real   torch.clamp({x}, -2, 2)
real   torch.clamp({x}, min={n})
real   torch.maximum({x}, {b})
real   torch.minimum({x}, {b})
real   F.hardtanh({x})
rfloat F.leaky_relu({x}, 0.25)
num    {x}.sum()
num    {x}.mean().real if {x}.is_complex() else {x}.sum()
num1   {x}.sum({d})
num1   {x}.sum({d}, keepdim=True)
num2   {x}.sum(({d}, {e}))
num    {x}.sum(dtype=torch.float64) if not {x}.is_complex() else {x}.sum()
real1  {x}.amax({d})
real1  {x}.amin({d}, keepdim=True)
real1  {x}.amax()
real   {x}.max()
real   {x}.min()
real   torch.aminmax({x})
real1  {x}.cumsum({d})
real1  torch.diff({x}, dim={d})
real1  torch.cummax({x}, {d}).values
bool   {x}.sum()
bool1  {x}.any({d})
bool1  {x}.all({d})
bool   {x}.any()
bool   ~{x}
bool   {x} & {b}
bool   torch.logical_or({x}, {b})
bool   {x} ^ {b}
int    {x} & {b}
int    {x} // 2
int    {x} % 3
int    torch.bitwise_left_shift({x}, 1)
any2   {x}.t() if {x}.ndim == 2 else {x}.transpose(0, 1)
any2   {x}.transpose({d}, {e})
any2   {x}.permute({perm})
any2   torch.movedim({x}, {d}, {e})
any1   {x}.reshape({shape})
any1   {x}.view({shape})
any1   {x}.flatten()
any2   {x}.flatten(0, 1)
any    {x}.unsqueeze(0)
any    {x}.unsqueeze(-1)
any1   {x}.squeeze()
any1   {x}.squeeze({d})
any1   {x}.unsqueeze(0).expand(2, *{x}.shape)
any1   {x}.narrow({d}, {start}, {length})
any1   {x}.select({d}, {k})
any1   {x}[{k0}]
any1   {x}[1:]
any1   {x}[::2]
any1   {x}[..., -1]
any1   {x}[..., :2]
any1   {x}[None]
any2   {x}[:, 1:]
any2   {x}[{k0}, ..., :1]
any1   {x}.chunk(2, {d})
any1   {x}.split({length1}, {d})
any1   {x}.split({length1}, {d})[0]
any1   torch.unbind({x}, {d})[0]
any1   torch.cat([{x}, {y}], {d})
any1   torch.cat([{x}, {x}], {d})
any    torch.stack([{x}, {y}], 0)
any    torch.stack([{x}, {y}], -1)
any1   torch.flip({x}, ({d},))
any1   torch.roll({x}, 1, {d})
num2   torch.tril({x})
num2   torch.triu({x}, 1)
any2   torch.diagonal({x})
any1   {x}.repeat(*([1] * ({x}.ndim - 1)), 2)
any1   torch.repeat_interleave({x}, 2, {d})
any1   {x}.unfold({d}, {length}, 1)
num1   F.pad({x}, (1, 1))
any    {x}.clone()
any    {x}.contiguous()
any    {x}.detach()
num    {x}.to(torch.complex128)
real   {x}.double()
any    torch.zeros_like({x})
any    torch.ones_like({x}) + {x}
num    torch.full_like({x}, 2)
any    {x}.new_zeros({x}.shape)
cplx   {x}.conj()
cplx   {x}.real
cplx   {x}.imag
cplx   torch.view_as_real({x})
any1   torch.index_select({x}, {d}, {index})
any1   {x}[{index0}]
any2   {x}[:, {index1}]
any1   torch.gather({x}, {d}, {scatter})
any1   torch.take_along_dim({x}, {scatter}, {d})
num1   torch.index_add({x}, {d}, {index}, {xindex})
num1   torch.index_copy({x}, {d}, {single}, {xsingle})
num1   torch.scatter_add({x}, {d}, {scatter}, {xscatter})
num1   torch.scatter({x}, {d}, {scatter}, 1)
any    torch.where({mask}, {x}, {y})
num    torch.where({mask}, {x}, 0)
num    {x}.masked_fill({mask}, 2)
num2   {x} @ {m}
num2   torch.matmul({x}, {m})
num=2  torch.mm({x}, {m})
num=2  {x} @ {x}.t()
num=2  torch.mm({x}, {x}.t())
num=2  torch.addmm({row}, {x}, {m})
num=3  torch.bmm({x}, {m})
num1   F.linear({x}, {w})
num1   F.linear({x}, {w}, {bias})
num=2  F.linear({x}, {x})
num=1  torch.dot({x}, {y})
num=1  torch.dot({x}, {x})
num=1  torch.outer({x}, {y})
num=2  torch.mv({x}, {row})
num=2  torch.einsum('ij,kj->ik', {x}, {w})
num=2  torch.einsum('ij,ij->j', {x}, {y})
num2   torch.einsum('...i,i->...', {x}, {row})
num=2  torch.kron({x}, {x})
num2   torch.tensordot({x}, {y}, {x}.ndim)
real   torch.masked.sum({x}, mask={mask})
int    F.embedding(({x} % 3).abs(), {table})
int    F.one_hot(({x} % 3).abs(), 3)
num    checkpoint(lambda t: t * t + t, {x}, use_reentrant=False)
rfloat torch.func.grad(lambda t: (t * t).sum())({x})
rfloat torch.func.vmap(lambda t: t * 2)({x}.reshape(1, *{x}.shape))
any    redistribute({x}, {spec})
any    redistribute({x}, {spec})
num1   with_view(lambda t: t[::2], {x})
num2   with_view(lambda t: t[1:, :2], {x})
num2   with_view(lambda t: t.transpose({d}, {e}), {x})
num1   with_view(lambda t: t.view(-1), {x})
num1   with_view(lambda t: t.unflatten(-1, (-1, 1)), {x})
num    {x}.sum().item()
bool   bool({x}.all())
num    torch.equal({x}, {y})
any    {x}.numel() + {x}.ndim + sum({x}.shape)
any1   len({x})
num    !{x}.add_({b})
num    !{x}.sub_({y}, alpha={n})
num    !{x}.mul_({b})
num    !{x} += {b}
num    !{x} *= {n}
num    !{x}.zero_()
num    !{x}.fill_({n})
num    !{x}.copy_({b})
num    !{x}.neg_()
real   !{x}.clamp_(-1, 1)
rfloat !F.relu_({x})
num    !{x}.addcmul_({y}, {b})
num    !{x}.masked_fill_({mask}, 1)
num1   !{x}.index_add_({d}, {index}, {xindex})
num1   !{x}.index_fill_({d}, {index}, 2)
num1   !{x}.scatter_add_({d}, {scatter}, {xscatter})
num1   !{x}[{k0}] = 1
num1   !{x}[{k0}] += 1
num1   !{x}[1:] = 3
num1   !{x}[{mask}] = 2
num1   !{x}[{index0}] = 1
num2   !{x}[:, :1] = {x}[:, -1:]
num1   !{x}.narrow({d}, {start}, {length}).add_(1)
num1   !{x}.select({d}, {k}).zero_()
num2   !{x}.transpose({d}, {e}).mul_(2)
num    !{x}.view(-1).add_(1)
num1   !{x}.unsqueeze(0).sub_(1)
num    !torch.add({x}, {b}, out={y})
num    !torch.mul({x}, {b}, out={y})
num    !torch.neg({x}, out={y})
num    !torch.sub({x}, {y}, out={x})
num    !torch._foreach_add_([{x}, {y}], 1)
"""

# Continuous, and rounded: a change in the last digit of what goes in changes the last digits of what comes out.
SMOOTH = """
num    {x} / ({b}.abs() + 1)
num    {x} / 3
rfloat {x} / {x}.abs().sum().clamp(min=1)
rfloat {x} - {x}.mean()
float  {x}.mean()
float1 {x}.mean({d})
float1 {x}.mean({d}, keepdim=True)
float  torch.exp({x} / 8)
float  torch.sin({x})
float  torch.tanh({x})
float  torch.sigmoid({x} / 4)
rfloat torch.sqrt({x}.abs() + 1)
rfloat torch.rsqrt({x}.abs() + 1)
rfloat torch.log({x}.abs() + 1)
rfloat torch.log1p({x}.abs())
rfloat torch.expm1({x} / 8)
rfloat torch.atan2({x}, {b}.abs() + 1)
rfloat torch.hypot({x}, {b}.abs() + 1)
rfloat torch.erf({x})
rfloat torch.pow({x}.abs() + 1, 1.5)
float  torch.lerp({x}, {y}, 0.3)
float  torch.addcdiv({x}, {y}, {z}.abs() + 1)
rfloat F.gelu({x})
rfloat F.gelu({x}, approximate='tanh')
rfloat F.silu({x})
rfloat F.softplus({x})
rfloat F.elu({x})
rfloat F.mish({x})
rfloat1 F.logsigmoid({x})
rfloat1 torch.softmax({x}, {d})
rfloat1 torch.log_softmax({x}, {d})
rfloat1 F.softmax({x}, dim={d}, dtype=torch.float64)
rfloat1 torch.logsumexp({x}, {d})
rfloat1 torch.logcumsumexp({x}, {d})
float1 torch.cumprod({x} / 4, {d})
float1 ({x} / 4).prod({d})
float  ({x} / 4).prod()
float1 {x}.var({d})
float1 {x}.var({d}, correction=0)
rfloat1 {x}.std({d}, correction=0)
rfloat torch.std({x}, correction=0)
rfloat1 torch.std({x}, {d})
rfloat1 {t}, {u} = torch.var_mean({x}, {d}, correction=0)
float  torch.linalg.vector_norm({x})
float  {x}.norm()
float1 {x}.norm(2, {d})
float1 torch.linalg.vector_norm({x}, 1, {d})
rfloat1 torch.linalg.vector_norm({x}, float('inf'), {d})
rfloat torch.linalg.vector_norm({x}, float('inf'))
float1 F.normalize({x}, dim={d}, eps=1.0)
rfloat1 F.cosine_similarity({x}, {y}, dim={d}, eps=1.0)
rfloat1 F.layer_norm({x}, {x}.shape[-1:])
rfloat1 F.layer_norm({x}, {x}.shape[-1:], {row}, {row})
rfloat1 F.rms_norm({x}, {x}.shape[-1:], {row}, eps=1e-3)
rfloat2 F.group_norm({x}, 1)
rfloat2 F.batch_norm({x}, None, None, training=True)
rfloat2 F.instance_norm({x})
rfloat=3 F.scaled_dot_product_attention({x}, {y}, {z})
rfloat=3 F.scaled_dot_product_attention({x}, {x}, {x}, is_causal=True)
rfloat=3 F.conv1d({x}, {kernel}, padding=1)
rfloat=3 F.avg_pool1d({x}, 2, 1)
rfloat=3 F.max_pool1d({x}, 2, 1)
rfloat F.mse_loss({x}, {y})
rfloat F.l1_loss({x}, {y})
rfloat F.smooth_l1_loss({x}, {y})
rfloat F.huber_loss({x}, {y}, reduction='none')
rfloat F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}))
rfloat1 F.kl_div(torch.log_softmax({x}, -1), torch.softmax({y}, -1), reduction='batchmean')
rfloat=2 F.cross_entropy({x}, {labels})
rfloat=2 F.cross_entropy({x}, {labels}, label_smoothing=0.1, reduction='none')
rfloat=2 F.nll_loss(torch.log_softmax({x}, 1), {labels})
rfloat1 F.glu(torch.cat([{x}, {y}], -1))
rfloat1 F.linear(F.gelu({x}), {w}).sum()
rfloat=2 torch.cdist({x}, {y} + 9)
rfloat=2 F.pairwise_distance({x}, {y} + 9)
rfloat2 F.softmax({x} @ {x}.transpose(-1, -2), -1) @ {x}
float  {x} * {x}.sum() / 100
rfloat checkpoint(lambda t: F.silu(t) * t, {x}, use_reentrant=False)
rfloat {x}.bfloat16()
rfloat {x}.float()
rfloat torch.nan_to_num({x})
rfloat torch.complex({x}, {y}).abs()
rfloat1 torch.complex({x}, {y}).cumsum({d}).real
rfloat torch.polar({x}.abs() + 1, {y}).imag
rfloat2 torch.fft.fft(torch.complex({x}, {y}), dim={d}).real
rfloat1 torch.trapezoid({x}, dim={d})
rfloat1 torch.nanmean({x}, {d})
rfloat1 torch.quantile({x}.double(), 0.5, {d})
rfloat1 {x}.dist({y})
rfloat !{x}.div_({b}.abs() + 1)
float  !{x}.lerp_({y}, 0.5)
float  !{x}.sigmoid_()
rfloat !torch.div({x}, {b}.abs() + 1, out={y})
rfloat !torch.exp({x} / 8, out={y})
rfloat float({x}.mean())
rfloat f'{{abs(float({x}.sum())):.2f}}' if {x}.dtype == torch.float64 else 0
"""

# With jumps: only for tensors that are exact, so that a rounded digit cannot change the side. Of elements that share
# memory torch itself gives wrong medians.
SHARP = """
real   torch.sign({x})
real   {x} > {b}
any    {x} == {b}
num    {x} != 0
real   torch.le({x}, {b})
real   torch.isclose({x}, {b})
real   torch.allclose({x}, {y})
rfloat torch.floor({x} / 2)
rfloat torch.round({x} / 2)
rfloat torch.heaviside({x}, {b})
real   torch.fmod({x}, 3)
real   torch.remainder({x}, 3)
num    {x}.bool()
rfloat {x}.long()
real1  {x}.argmax({d})
real1  {x}.argmin({d}, keepdim=True)
real   {x}.argmax()
real1  {x}.max({d}).values
real1  {x}.min({d}).values
real1  {t}, {u} = torch.max({x}, {d})
real1  torch.sort({x}, {d}).values
real1  {t}, {u} = torch.sort({x}, dim={d}, stable=True)
real1  torch.argsort({x}, dim={d}, stable=True)
real1  torch.topk({x}, {length1}, {d}).values
real1  torch.kthvalue({x}.contiguous(), {length1}, {d}).values
real1  torch.median({x}.contiguous(), {d}).values
real   torch.median({x})
num1   torch.count_nonzero({x}, {d})
num    torch.count_nonzero({x})
any    torch.nonzero({x})
any    torch.argwhere({x})
any    torch.masked_select({x}, {mask})
real   {x}[{x} > 0]
real   {x}[{x} > 0].sum()
any1   {x}[{mask}]
real1  ({x} * 3).int().prod({d})
real1  {x}.long().cumsum({d})
real   {x}.to(torch.int32).sum(dtype=torch.float32)
real2  {x}[{x}.argmax(0) % {x}.shape[0]]
real   torch.unique({x})
real   {t}, {u} = torch.unique({x}, return_counts=True)
real=1 torch.unique_consecutive({x})
int=1  torch.bincount({x}.abs())
real   torch.histc({x}.double(), 4, -4, 4)
real   torch.isin({x}, {row})
real1  torch.searchsorted(torch.sort({row}.flatten()).values, {x}.contiguous())
real   torch.bucketize({x}, torch.sort({row}.flatten()).values)
num    int(({x} != 0).sum())
float  {x} / {b}
float  torch.linalg.vector_norm({x}, 0)
rfloat torch.sqrt({x})
rfloat torch.log({x})
rfloat torch.isnan({x} / {b})
num    !{x}[{x} == 0] = 1
real   !{x}.clamp_({row}.min().item(), 3)
rfloat !{x}.floor_()
"""

# Where ranks without parts have gone another way than those with parts: for programs in which a rank holds nothing.
EMPTY_RANKS = """
any2   !{x}.transpose_(0, 1)
any2   !{x}.swapaxes_(0, -1)
any=2  !{x}.t_()
any    !{x}.unsqueeze_(0)
any1   !{x}.squeeze_()
any1   {x}[[i % 2 == 0 for i in range({x}.shape[0])]]
any1   {x}[[0] * {x}.shape[0]]
any1   {x}[{index0} // 2]
any1   {x}.index_select({d}, {index} // 2)
any    {x}[None, True]
num    !{x}[True] = 1
num    !{x}[False] = 1
real   {x}.sum(dim=None)
rfloat {x}.mean(dim=None)
num    {x}.sum(dim=())
real   {x}.any(dim=())
real   {x}.all(dim=())
any1   {x}.unbind(0)
num    {t}, {u} = torch._foreach_add([{x}, {y}], [{y}, {x}])
num    {t}, {u} = torch._foreach_mul([{x}, {y}], 2)
num    !torch._foreach_mul_([{x}, {y}], 2)
num    {t}, {u} = torch.broadcast_tensors({x}, {b})
num    {x}.sum() + {y}.sum()
num    torch.stack([{x}.sum(), {y}.sum()])
num    {x} * {y}.sum()
num    hooked({x})
num    saved_on_host(lambda t: t * t, {x})
any    {x}.dtype == {y}.dtype and {x}.requires_grad
any    {x}.stride() + tuple({x}.t().size() if {x}.ndim < 3 else {x}.size())
any    {x}.clone().detach().requires_grad
"""

EMPTY_RANKS_SMOOTH = """
rfloat torch.nanmean({x})
rfloat {x}.var()
rfloat F.hinge_embedding_loss({x}, {y}.detach().sign() * 2 + 1)
rfloat F.margin_ranking_loss({x}, {y}, {z}.detach())
rfloat1 {x}.softmax({d}) * {x}
rfloat torch._foreach_norm([{x}, {y}])
rfloat torch.nn.utils.get_total_norm([{x}, {y}])
rfloat saved_on_host(lambda t: t.tanh() * t, {x})
rfloat hooked({x}.tanh())
"""

_CLASSES = {"any", "num", "real", "float", "rfloat", "int", "bool", "cplx"}
_ROW = re.compile(r"([a-z]+)(=?)(\d?)\s+(.+)")


@dataclass(frozen=True)
class Operator:
    """One row: which first tensor it takes, its template, its name in reports, and what it does to exact numbers."""

    kind: str
    dims: int
    only: bool
    template: str
    keeps: bool
    needs: bool

    @property
    def name(self) -> str:
        """The template with the fields left out, short enough for a table.

        >>> Operator("num", 0, False, "torch.add({x}, {b})", True, False).name
        'torch.add(x, b)'
        """
        return re.sub(r"\{(\w+)\}", r"\1", self.template.removeprefix("!")).replace("{{", "{").replace("}}", "}")

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor and gives no result."""
        return self.template.startswith("!")

    @property
    def statement(self) -> str:
        """The template of the whole statement."""
        if self.writes:
            return self.template[1:]
        return self.template if self.template.startswith("{t}") else "{t} = " + self.template


def parse_table(table: str, keeps: bool, needs: bool) -> list[Operator]:
    """The rows of a table."""
    found = []
    for line in table.strip().splitlines():
        match = _ROW.fullmatch(line)
        assert match is not None and match[1] in _CLASSES, f"not a row of the table of operators: {line!r}"
        found.append(Operator(match[1], int(match[3] or 0), bool(match[2]), match[4], keeps, needs))
    return found


OPERATORS = tuple(
    [*parse_table(EXACT, True, False), *parse_table(SMOOTH, False, False), *parse_table(SHARP, True, True)]
)
EMPTY_RANK_OPERATORS = (*parse_table(EMPTY_RANKS, True, False), *parse_table(EMPTY_RANKS_SMOOTH, False, False))
