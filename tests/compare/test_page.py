"""compare.html in a headless browser: it sorts, by address and by click; no script fails; nothing is too wide."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from tests.compare.folders import write_sweep
from tests.docs.pages import script

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a chromium in PATH (Debian: apt-get install chromium)"
)
# Added behind the page's own script: what a user would do; what the browser made of it goes into attributes of <html>.
PROBE = """<script>
const say = (name, value) => { document.documentElement.dataset[name] = value; };
const all = (selector) => [...document.querySelectorAll(selector)];
const order = () => all("tbody th .choice:first-child").map((choice) => choice.innerText.split(/\\s/)[0]).join(" ");
const sorted = () => all("th[aria-sort]").map((head) => `${head.dataset.key}:${head.ariaSort}`).join();
const go = (hash) => { location.hash = hash; window.dispatchEvent(new Event("hashchange")); return order(); };
const press = (key) => { all(`th[data-key=${key}] button`)[0].click(); return `${order()} ${sorted()}`; };
STEPS
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sweep(tmp_path_factory.mktemp("sweep"), overlaps=("none", "shortcut", "chunked"))
    assert script("scripts/compare.py").main([str(folder)]) == 0
    return folder / "compare.html"


def browse(page: Path, *options: str, address: str = "") -> str:
    profile = page.parent / "profile"
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri() + address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout


def dom(page: Path, *steps: str, address: str = "") -> dict[str, str]:
    """Attributes `data-...` of <html> after the page's script and these steps ran."""
    probed = page.with_name("probed.html")
    probe = PROBE.replace("STEPS", "\n".join(steps))
    probed.write_text(
        page.read_text(encoding="utf-8").replace("</body>", probe + "</body>"), encoding="utf-8"
    )
    text = browse(probed, "--window-size=1200,900", "--dump-dom", address=address)
    (tag,) = re.findall(r"<html[^>]*>", text)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', tag))


def test_the_script_runs_to_its_end_and_an_address_sorts(page: Path):
    seen = dom(page, 'say("order", order());', address="#sort=tokens_per_second,desc")
    assert seen == {"ready": "true", "order": "overlap=chunked overlap=shortcut overlap=none"}


def test_an_error_of_the_script_would_be_seen(page: Path):
    assert "error" in dom(page, "gone();")


def test_every_kind_of_column_sorts_and_what_is_unknown_stays_last(page: Path):
    addresses = ("tokens_per_second", "arm", "val_loss_difference", "val_loss_difference,desc", "nothing")
    seen = dom(page, *(f'say("n{n}", go("#sort={address}"));' for n, address in enumerate(addresses)))
    orders = [seen[f"n{n}"].replace("overlap=", "").split() for n in range(len(addresses))]
    assert orders == [
        ["none", "shortcut", "chunked"],
        ["chunked", "none", "shortcut"],
        ["chunked", "shortcut", "none"],
        ["shortcut", "chunked", "none"],
        ["shortcut", "chunked", "none"],
    ]
    assert "error" not in seen


def test_heads_sort_by_click_and_are_buttons_of_the_keyboard(page: Path):
    tabs = '[...document.querySelectorAll("thead button")].every((button) => button.tabIndex === 0)'
    seen = dom(
        page,
        'say("first", press("step_ms")); say("again", press("step_ms")); say("other", press("mfu"));',
        f'say("tabs", {tabs});',
    )
    assert seen["first"] == "overlap=chunked overlap=shortcut overlap=none step_ms:ascending"
    assert seen["again"] == "overlap=none overlap=shortcut overlap=chunked step_ms:descending"
    assert seen["other"].endswith(" mfu:ascending") and seen["tabs"] == "true" and "error" not in seen


def test_a_picture_opens_in_full_size(page: Path):
    seen = dom(
        page,
        'document.querySelector("figure button").click();',
        'const opened = document.querySelector("dialog");',
        'say("open", opened.open && opened.querySelector("img").src.startsWith("data:image/png")); opened.click();',
        'say("closed", !opened.open);',
    )
    assert (seen["open"], seen["closed"]) == ("true", "true")


def framed(page: Path, width: int) -> Path:
    """A page that shows it in a window of this width: a browser's own window has a least width."""
    frame = page.with_name(f"framed_{width}.html")
    inner = html.escape(page.read_text(encoding="utf-8"))
    measure = (
        "const shown = this.contentDocument.documentElement; "
        "document.documentElement.dataset.wide = shown.scrollWidth; "
        "document.documentElement.dataset.high = shown.scrollHeight"
    )
    frame.write_text(
        f'<!doctype html><html><body style="margin:0"><iframe style="border:0" width="{width}" height="2600" '
        f"onload=\"{measure}\" srcdoc='{inner}'></iframe></body></html>",
        encoding="utf-8",
    )
    return frame


@pytest.mark.parametrize("width", [1200, 400])
def test_nothing_is_wider_than_the_window(page: Path, width: int):
    text = browse(framed(page, width), f"--window-size={max(width, 500)},900", "--dump-dom")
    wide, high = (int(re.search(rf'data-{name}="(\d+)"', text).group(1)) for name in ("wide", "high"))
    assert wide == width and high > 1000


def test_it_can_be_seen(page: Path, tmp_path: Path):
    browse(page, "--window-size=1200,1600", f"--screenshot={tmp_path / 'page.png'}")
    with Image.open(tmp_path / "page.png") as image:
        assert image.size == (1200, 1600)
        assert len(image.convert("RGB").getcolors(2**24)) > 100
