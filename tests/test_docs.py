"""Every Python block of README.md and docs/ runs, and prints what the page says it prints."""

import doctest
import io
import re
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^([ ]*)(`{3,})python[ ]*\n(.*?)^\1\2`*[ ]*$", re.DOTALL | re.MULTILINE)


def run_block(code: str, page: str, line: int, namespace: dict[str, Any]) -> None:
    """Run the code whose first line is `line` of the page: a doctest where it has prompts."""
    if not re.search(r"^\s*>>> ", code, re.MULTILINE):
        # Blank lines in front make a traceback name the line of the page.
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
        return
    test = doctest.DocTestParser().get_doctest(code, namespace, page, page, line - 1)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    namespace.update(test.globs)
    assert not runner.failures, report.getvalue()


def run_page(text: str, page: str) -> int:
    """Run the blocks of a page in one namespace, and say how many there were."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    # A reader has JAX's own settings, not the strict ones of the tests.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            line = text.count("\n", 0, block.start(3)) + 1
            run_block(block[3], page, line, namespace)
    return len(blocks)


# torch says so at every save and load of a single process; a reader sees it too.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
# So does JAX at each fork, of which docs/prefetch.md tells, and torchdata of a deprecation.
@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_page(page.read_text(), str(page))


PAGE = """\
```python
x = 1
```

Some text, then:

```python
>>> x + 1
2
>>> y = x + 2
```

```text
not run
```

```python
assert y == 3
```
"""


def test_blocks_share_one_namespace():
    assert run_page(PAGE, "page.md") == 3


def test_other_output_fails_and_names_the_line():
    with pytest.raises(AssertionError, match=r'File "page.md", line 8, in page.md\n(.*\n)* *Got:'):
        run_page(PAGE.replace("\n2\n", "\n7\n"), "page.md")


def test_an_error_fails_and_names_the_line():
    with pytest.raises(AssertionError) as caught:
        run_page(PAGE.replace("y == 3", "y == 4"), "page.md")
    assert caught.traceback[-1].lineno == 18 - 1  # counted from 0
