"""The bundle is what the modules say now, and what the bundler does not understand it refuses in a sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from widgets.bundle import BUNDLE, COMMAND, ENTRY, BundleError, bundle, main


def test_the_committed_bundle_is_current() -> None:
    script, style = bundle()
    committed = BUNDLE.read_text(encoding="utf-8"), BUNDLE.with_suffix(".css").read_text(encoding="utf-8")
    assert committed == (script, style), f"the bundle is not what the modules say now; run: {COMMAND}"


def test_every_module_and_every_style_sheet_is_in_the_bundle() -> None:
    script, style = bundle()
    beside = [path for path in ENTRY.parent.rglob("*") if path.parent != BUNDLE.parent]
    modules = {path.relative_to(ENTRY.parent).as_posix() for path in beside if path.suffix == ".js"}
    assert set(re.findall(r"^// ---- (\S+)", script, re.MULTILINE)) == modules
    sheets = [path for path in beside if path.suffix == ".css"]
    assert len(sheets) > 10
    assert all(path.read_text(encoding="utf-8").strip() in style for path in sheets)


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    """The entry of three modules in two folders, one with a style sheet."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "one.js").write_text("export const one = 1;\n")
    (tmp_path / "b" / "two.js").write_text(
        'import { one } from "../a/one.js";\n\nconst half = one;\nexport function two() {\n  return half + one;\n}\n'
    )
    (tmp_path / "b" / "two.css").write_text(".two { color: red; }\n")
    path = tmp_path / "entry.js"
    path.write_text(
        'import { one } from "./a/one.js";\nimport {\n  two,\n} from "./b/two.js";\n\n'
        "export { one, two };\nexport default () => one;\n"
    )
    return path


def test_modules_come_after_what_they_import_without_imports_and_inner_exports(entry: Path) -> None:
    script, style = bundle(entry)
    code = [line for line in script.splitlines() if line and not line.startswith("//")]
    assert code == [
        "const one = 1;",
        "const half = one;",
        "function two() {",
        "  return half + one;",
        "}",
        "export { one, two };",
        "export default () => one;",
    ]
    assert style.endswith(".two { color: red; }\n")


CANNOT = "has a line that cannot be bundled"
REFUSED = {
    "a default import": ('import one from "../a/one.js";\n', CANNOT),
    "a rename": ('import { one as uno } from "../a/one.js";\n', CANNOT),
    "everything at once": ('import * as a from "../a/one.js";\n', CANNOT),
    "a package": ('import { h } from "preact";\n', CANNOT),
    "an import on one line with another": ('import { one } from "../a/one.js"; one();\n', CANNOT),
    "an export of another module": ('export { one } from "../a/one.js";\n', CANNOT),
    "a list of exports": ("const two = 2;\nexport { two };\n", CANNOT),
    "a default export": ("export default 2;\n", CANNOT),
    "several names": ("const [two, three] = [2, 3];\n", "declares several names at once"),
    "a name that is not there": ('import { three } from "../a/one.js";\n', "imports 'three', which a/one.js does not"),
    "a name twice": ("export const two = 1;\nfunction one() {}\n", "b/two.js and a/one.js both declare 'one'"),
    "a missing file": ('import { x } from "./x.js";\n', r"b/two.js imports b/x.js, which does not exist"),
    "a circle": ('import { two } from "./two.js";\n', "circle: b/two.js imports b/two.js"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_understand_is_a_sentence(entry: Path, name: str) -> None:
    source, sentence = REFUSED[name]
    (entry.parent / "b" / "two.js").write_text(source)
    with pytest.raises(BundleError, match=sentence):
        bundle(entry)


def test_a_longer_circle_is_named_from_end_to_end(entry: Path) -> None:
    (entry.parent / "a" / "one.js").write_text('import { two } from "../b/two.js";\nexport const one = two;\n')
    with pytest.raises(BundleError, match=r"circle: a/one.js imports b/two.js imports a/one.js$"):
        bundle(entry)


def test_the_command_writes_both_files(entry: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, style = bundle(entry)
    monkeypatch.setattr("widgets.bundle.bundle", lambda: (script, style))
    monkeypatch.setattr("widgets.bundle.BUNDLE", tmp_path / "out.js")
    main()
    assert (tmp_path / "out.js").read_text() == script
    assert (tmp_path / "out.css").read_text() == style


def test_the_command_leaves_with_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> tuple[str, str]:
        raise BundleError("a.js and b.js both declare 'x'; rename one of them")

    monkeypatch.setattr("widgets.bundle.bundle", refuse)
    with pytest.raises(SystemExit, match=r"both declare 'x'; rename one of them\.$"):
        main()
