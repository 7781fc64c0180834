"""How does the README become the text of the package page? Called by the build; see `tools.docs_text.link_absolute`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.docs_text import link_absolute


class PackagePage(MetadataHookInterface):  # type: ignore[misc]  # hatchling is there while the package is built
    """The README, with links that work outside of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": link_absolute(text)}
