"""Chromium, opened on pages from files, without a network."""

import os
import re
import shutil

import pytest

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,900",
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in programs.items() if path is None]:
        reason = f"{' and '.join(missing)} not found on PATH (Debian: chromium, chromium-driver)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = programs["chromium"]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(programs["chromedriver"]))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser, width):
    # A desktop window cannot be as narrow as a phone; an emulated screen can.
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    browser.refresh()
    assert browser.execute_script("return innerWidth") == width
    wait_for_plots(browser)


def wait_for_plots(browser):
    """Wait for two frames: plots are drawn when they are seen, after the first."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
    )


def line_paths(browser, plot):
    """The `d` of every line that is drawn in the axes, and the width of what it draws."""
    return browser.execute_script(
        """
        return [...document.querySelectorAll(`#${arguments[0]} path.line`)]
          .map(path => [path.getAttribute('d'), path.getBoundingClientRect().width]);
        """,
        plot,
    )


def colours(browser, mode):
    """Show the page in a light or a dark mode."""
    preference = {"name": "prefers-color-scheme", "value": mode}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})


def outside_scripts(page):
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
