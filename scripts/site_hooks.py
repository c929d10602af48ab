"""What the documentation's pages take from the program: the options and keys of conf/, and pages that are there or not.

MkDocs calls these functions when it builds the site (mkdocs.yml).
"""

from pathlib import Path
from typing import Any

from bfl_bench.commands.config_files import Entry, find_file, list_options, read_file, read_option, read_title
from bfl_bench.groups import GROUPS
from bfl_bench.records import config_folder

PAGE = "reference/configuration.md"
OPTIONAL = {"security.md": "Security"}
"""Pages that are in the navigation where they exist, by file."""

LINKED = "https://example.org/bfl-bench/blob/main/"
"""Where files of the repository that are no pages of the site are read; the address is a placeholder."""


def on_config(config: Any) -> Any:
    """Add the optional pages to the navigation."""
    there = {file: title for file, title in OPTIONAL.items() if (Path(config["docs_dir"]) / file).exists()}
    config["nav"] += [{title: file} for file, title in there.items()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the page that is made of conf/."""
    from mkdocs.structure.files import File

    if files.get_file_from_path(PAGE) is None:
        files.append(File.generated(config, PAGE, content=describe_configuration()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links out of docs/ to the repository."""
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "reference/README.md", "examples", "conf"):
        markdown = markdown.replace(f"](../{name}", f"]({LINKED}{name}").replace(f"](../../{name}", f"]({LINKED}{name}")
    return markdown


def describe_configuration() -> str:
    """Describe every group with its options and their keys, and the keys beside the groups."""
    folders = [config_folder()]
    top = read_file(folders[0] / "config.yaml", "config", "")
    lines = ["# Options and keys", "", "Made from the files in `conf/`. `bfl-run --help KEY` says the same.", ""]
    lines += ["## Keys beside the groups", ""]
    lines += _table([entry for entry in top.entries if not entry.key.startswith("hydra.")])
    for group in GROUPS:
        names = list_options(group, folders)
        lines += ["", f"## `{group}`", "", "| option | |", "|---|---|"]
        for name in names:
            path = find_file(f"{group}/{name}", folders)
            lines.append(f"| `{name}` | {_escape(read_title(path) if path else '')} |")
        for name in names:
            entries = [one for key, one in read_option(group, name, folders).entries.items() if _is_shown(key)]
            if entries:
                lines += ["", f"### `{group}={name}`", "", *_table(entries)]
    return "\n".join(lines) + "\n"


def _is_shown(key: str) -> bool:
    return not key.endswith(("._target_", ".name")) and not key.startswith("hydra.")


def _table(entries: list[Entry]) -> list[str]:
    rows = [
        f"| `{entry.key}` | `{_escape(entry.value)}` | {_escape(' '.join([*entry.above, entry.beside]).strip())} |"
        for entry in entries
    ]
    return ["| key | default | |", "|---|---|---|", *rows]


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[") if "`" not in text else text
