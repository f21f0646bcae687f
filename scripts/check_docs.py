"""Check the documentation: links lead somewhere, commands can be typed, nothing documented is missing.

    .venv/bin/python scripts/check_docs.py

- Every relative link leads to a file, and its #anchor to a heading there.
- Headings are unique within a page.
- ``closeranks ...`` in code blocks has a verb and flags that exist; Python blocks compile.
- Every page is in mkdocs.yml, and the other way round.
- Every setting, verb, and variable that ranks are given is documented.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from closeranks.cli.flags_scan import scan
from closeranks.cli.flags_table import FLAGS
from closeranks.cli.main import VERBS
from closeranks.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
_FENCE = re.compile(r"\s*(```+|~~~+)\s*(\S*)")


@dataclass(slots=True)
class Page:
    """A Markdown file, taken apart."""

    path: Path
    prose: list[tuple[int, str]] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    blocks: list[tuple[int, str, list[str]]] = field(default_factory=list)  # line, language, lines

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def anchors(self) -> set[str]:
        return {slug(heading) for heading in self.headings}


def slug(heading: str) -> str:
    """The anchor that GitHub and mkdocs make of a heading."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return text.replace(" ", "-")


def read(path: Path) -> Page:
    """Take a page apart into prose, headings and code blocks (fenced, or indented after an empty line)."""
    page = Page(path)
    fence, after_blank, indented = "", True, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        opening = _FENCE.match(line)
        if fence:
            if opening and opening[1].startswith(fence):
                fence = ""
            else:
                page.blocks[-1][2].append(line)
            continue
        if opening:
            fence = opening[1]
            page.blocks.append((number, opening[2], []))
            continue
        if line.startswith("    ") and (after_blank or indented):
            if not indented:
                page.blocks.append((number - 1, "", []))
            page.blocks[-1][2].append(line[4:])
            indented = True
        elif line.startswith("#"):
            page.headings.append(line.lstrip("#").strip().replace("`", ""))
            indented = False
        else:
            page.prose.append((number, line))
            indented = False
        after_blank = not line.strip()
    return page


def pages() -> list[Page]:
    """Every Markdown page of the repository."""
    paths = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    paths += (ROOT / "benchmarks").rglob("*.md")
    return [read(path) for path in sorted(paths)]


def wrong_links(page: Page, by_path: dict[Path, Page]) -> Iterator[str]:
    for number, line in page.prose:
        for target in _LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if re.match(r"(https?|mailto):", target):
                continue
            name, _, anchor = target.partition("#")
            path = (page.path.parent / name).resolve() if name else page.path
            if not path.exists():
                yield f"{page.name}:{number}: {target} leads nowhere"
            elif DOCS in page.path.parents and DOCS not in path.parents:
                yield f"{page.name}:{number}: {target} leaves docs/, and so the site"
            elif anchor and path in by_path and anchor not in by_path[path].anchors:
                yield f"{page.name}:{number}: {name or page.name} has no heading #{anchor}"


def commands(page: Page) -> Iterator[tuple[int, str]]:
    """Lines of code blocks that start closeranks, continued lines joined, prompt and assignments cut off."""
    for start, _, lines in page.blocks:
        joined = "\n".join(lines).replace("\\\n", " ").splitlines()
        for offset, line in enumerate(joined):
            text = re.sub(r"^\s*(\$ )?([A-Z_]+=\S+ )*", "", line)
            if text.startswith("closeranks "):
                yield start + offset + 1, text


def wrong_command(text: str) -> str:
    """What is wrong with a command line, or "". Optional parts in brackets count as given."""
    bare = re.sub(r"[\[\]|]", " ", text).replace("...", "")
    verb, *arguments = shlex.split(bare, comments=True)[1:] or [""]
    if verb in ("VERB", "--help", "--version"):
        return ""
    if verb not in VERBS:
        return f"there is no verb {verb!r}"
    module = import_module(VERBS[verb][0])
    if "--" in arguments:  # what follows is for closeranks run
        at = arguments.index("--")
        wrong = wrong_command(shlex.join(["closeranks", "run", *arguments[at + 1 :]]))
        if wrong:
            return wrong
        arguments = arguments[:at]
    if verb in ("run", "config", "engine"):
        arguments = [a for a in arguments if a not in ("show", "render", "flags", "of", "run", "--json")]
        try:
            scan(arguments, FLAGS)
        except UsageError as error:
            return str(error)
        return ""
    parser = argparse.ArgumentParser()
    module.configure(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [a for a in arguments if a.startswith("--") and a.partition("=")[0] not in known]
    return f"{verb} has no {unknown[0]}" if unknown else ""


def wrong_blocks(page: Page) -> Iterator[str]:
    for number, text in commands(page):
        if problem := wrong_command(text):
            yield f"{page.name}:{number}: {text}: {problem}"
    for start, language, lines in page.blocks:
        if language == "python":
            try:
                compile("\n".join(lines), page.name, "exec")
            except SyntaxError as error:
                yield f"{page.name}:{start + (error.lineno or 0)}: {error.msg}"


def wrong_headings(page: Page) -> Iterator[str]:
    for heading, count in Counter(map(slug, page.headings)).items():
        if count > 1:
            yield f"{page.name}: {count} headings #{heading}"


def wrong_navigation() -> Iterator[str]:
    listed = set(re.findall(r"^\s*- ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    present = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    yield from (f"mkdocs.yml: {name} doesn't exist" for name in sorted(listed - present))
    yield from (f"mkdocs.yml: {name} is missing" for name in sorted(present - listed))


def undocumented() -> Iterator[str]:
    """Names the code has and its reference page doesn't."""
    from closeranks.agent.env import base_environment, rank_environment
    from closeranks.cli.config_show import rows
    from closeranks.cli.flags import parse, to_config

    parsed = parse(["train.py"], {})
    config = to_config(parsed, lambda: "id")
    given = rank_environment(
        config,
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        node_rank=0,
        node_count=1,
        generation=0,
        master_port=1,
        run_id="",
        run_dir="",
        error_file="",
    )
    names = {
        "settings.md": [row.name for row in rows(config, parsed)],
        "environment.md": [*given, *base_environment(config, 2, {})],
    }
    for page, wanted in names.items():
        text = (DOCS / "reference" / page).read_text()
        yield from (f"docs/reference/{page} lacks {name}" for name in wanted if f"`{name}`" not in text)
    verbs = read(DOCS / "reference" / "cli.md").headings
    yield from (f"docs/reference/cli.md lacks a heading for {verb}" for verb in VERBS if verb not in verbs)


def main() -> int:
    """Print what is wrong; 1 if anything is."""
    found = pages()
    by_path = {page.path: page for page in found}
    problems = [
        problem
        for page in found
        for problem in (*wrong_links(page, by_path), *wrong_blocks(page), *wrong_headings(page))
    ]
    problems += [*wrong_navigation(), *undocumented()]
    print("\n".join(problems) if problems else f"{len(found)} pages are in order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
