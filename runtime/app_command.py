"""The command ``tfx app``. It needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from . import show
from .options import shared_options

__all__ = ["LANGUAGES", "app"]

LANGUAGES = ("c", "cpp", "node", "web")  # as app.LANGUAGES, which is not imported for the help alone; a test holds


@click.command()
@shared_options("bundle")
@click.option("--lang", type=click.Choice(LANGUAGES), required=True, help="Language of the project.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--name", help="Name of the program or package. [default: the folder's]")
@click.option("--no-copy", is_flag=True, help="Leave the bundle where it is, and write down where; not for web.")
@click.option("--force", is_flag=True, help="Replace a project that is as tfx app wrote it.")
@shared_options("json")
def app(bundle: Path, lang: str, out: Path, name: str | None, no_copy: bool, force: bool, as_json: bool) -> None:
    """Write a project in another language that runs a bundle and checks itself.

    BUNDLE is the folder to run, tfx-model when it is not given. The project is complete and yours to change, without
    any condition: sources, a README with the lines to build and run it, and a copy of the bundle.

    \b
    Example:
      tfx app --lang c --out embedder
      tfx app my-model --lang web --out page
    """  # noqa: D301 - click wants the backspace character
    from . import app as apps
    from .bundle import Bundle

    name = apps.app_name(out, name)
    apps.check_app_destination(out, force)
    opened = Bundle.open(bundle)
    folder = apps.write_app(opened, lang, out, name=name, copy=not no_copy, force=force)
    manifest, following = opened.manifest, apps.next_lines(lang, str(out), name)
    notes = apps.notes(lang, manifest)
    if as_json:
        show.print_json({"app": str(folder), "lang": lang, "name": name, "next": following, "notes": notes})
        return
    click.echo(f"written to {out}; next:")
    for line in following:
        click.echo(f"  {line}")
    for note in notes:
        click.echo(f"note: {note}", err=True)
