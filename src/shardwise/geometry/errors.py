"""The errors of the pure layers. All of them are `ValueError`s: something that was asked for breaks a rule."""


class LayoutError(ValueError):
    """A layout, spec, mesh or placement that breaks a rule; the text names the numbers and the fix."""


class NotationError(LayoutError):
    """A layout written in short notation that does not parse; `position` is the offending character's index."""

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")
        self.text = text
        self.position = position
