"""Can people find every page of the site? `make docs` builds it and fails for a broken link; this needs no Sphinx."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.house.test_docs import blocks_of
from tools.docs_text import HOME, link_absolute
from tools.readme_picture import PATH, draw_svg

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages() -> set[str]:
    """All pages by their path below docs, without the ending; not the first one, which holds the navigation."""
    found = [path for ending in ("md", "rst") for path in DOCS.rglob(f"*.{ending}")]
    return {path.relative_to(DOCS).with_suffix("").as_posix() for path in found} - {"index"}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [page for section in tomllib.loads((DOCS / "nav.toml").read_text()).values() for page in section]
    assert len(pages()) > 20
    assert sorted(listed) == sorted(pages())


def test_lines_of_prose_have_at_most_120_characters() -> None:
    """Tables, pictures and code have the lines that they need."""
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        prose = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        long = [row for row in prose.splitlines() if len(row) > 120 and not row.startswith(("|", "![", "`"))]
        assert not long, f"{page.name}: {long[0]}"


def test_every_page_starts_with_its_title() -> None:
    for page in DOCS.rglob("*.md"):
        assert page.read_text().startswith("# "), page.name


def test_the_first_page_leads_to_every_other_page() -> None:
    text = (DOCS / "index.md").read_text()
    assert [page for page in sorted(pages()) if "/" not in page and f"({page}.md)" not in text] == []


def test_the_picture_of_the_readme_is_what_its_tool_draws() -> None:
    assert PATH.read_text() == draw_svg()


def test_links_and_pictures_of_the_package_page_work_outside_of_the_repository() -> None:
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)#]+)[^)]*\)", link_absolute((ROOT / "README.md").read_text()))
    assert len(links) > 20 and any(picture for picture, _ in links)
    for picture, link in links:
        kind, _, path = link.removeprefix(f"{HOME}/").partition("/main/")
        assert kind == ("raw" if picture else "blob") and (ROOT / path).is_file(), link


def test_the_address_of_the_project_is_in_one_file() -> None:
    command = ["git", "grep", "-l", HOME.removeprefix("https://")]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode > 1:
        pytest.skip("not a git checkout")
    assert listed.stdout.split() == ["pyproject.toml"]


def test_scripts_for_clusters_and_ci_can_be_read() -> None:
    blocks = [block for name in ("clusters", "ci") for block in blocks_of((DOCS / f"{name}.md").read_text())]
    documents = [d for b in blocks if b.language == "yaml" for d in yaml.safe_load_all(b.body)]
    assert len(documents) == 3
    (command,) = documents[1]["spec"]["template"]["spec"]["containers"][0]["args"]
    scripts = [b.body for b in blocks if b.language == "bash"]
    for script in [*scripts, command]:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    for line in (scripts[0].partition("torchrun ")[2].partition("'")[0], command.removeprefix("torchrun ")):
        words = re.sub(r"\$\w+", "2", line.replace("\\\n", " ")).split()
        parsed = get_args_parser().parse_args(words)
        assert (parsed.nproc_per_node, parsed.master_port, parsed.training_script) == ("8", 29500, "train.py")
        assert (parsed.nnodes, parsed.node_rank) == ("2", 2)


def test_templates_of_issues_are_forms() -> None:
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")):
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form)
        assert all(f["type"] == "markdown" or f["attributes"]["label"] for f in form["body"])
