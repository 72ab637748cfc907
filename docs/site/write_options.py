"""Write the table of options in the reference from their declarations; ``make docs`` runs it."""

from pathlib import Path

from pgqueue.options import OPTIONS

PAGE = Path(__file__).parents[1] / "reference" / "options.md"


def text() -> str:
    rows = [
        f"| `{each.name}` | {each.metadata['is_for']} | {each.metadata['help']} | {default} |"
        for each in OPTIONS
        for default in [each.metadata["by_default"] or _shown(each.default)]
    ]
    return "\n".join(
        [
            "# Options",
            "",
            "The options of `@queue.task(...)` and of `task.options(...)`, which changes them for "
            "one enqueue. A task also has `name`, by default that of its module and function.",
            "",
            "<!-- Written by `make docs` from pgqueue/options.py: change that. -->",
            "",
            "| option | for | meaning | default |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown(default: object) -> str:
    return f"`{default!r}`" if isinstance(default, str | int | bool) else "none"


if __name__ == "__main__":
    PAGE.write_text(text(), "utf-8")
