"""The page in headless Chromium, against a live server: a question, its answer, the live view."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from speculoe_local.convert.embedded import embedded_model
from speculoe_local.runtime import EngineOptions, Sampling
from speculoe_local.server.settings import ModelSpec, Settings
from tests.server.conftest import Live, serve

# A picture for the README, where a folder for it is named.
_PICTURES = os.environ.get("SPECULOE_PICTURES")
_WAIT_MS = 60_000


@pytest.fixture(scope="module")
def settings() -> Settings:
    return Settings(
        models=(ModelSpec("embedded", embedded_model(None)),),
        engine=EngineOptions(ctx=1024, expert_budget="40%"),
        sampling=Sampling(temp=0),
        port=0,
    )


@pytest.fixture(scope="module")
def slotted(settings: Settings) -> Iterator[Live]:
    """A server whose experts do not all fit."""
    with serve(settings) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        # Root, in a container, has no sandbox to offer; only our own page is opened.
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


def opened(browser: Browser, url: str, errors: list[str]) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(_WAIT_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda told: errors.append(told.text) if told.type == "error" else None)
    page.goto(url)
    return page


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")


def test_a_question_is_answered_and_the_experts_are_seen_at_work(
    browser: Browser, slotted: Live
) -> None:
    errors: list[str] = []
    page = opened(browser, slotted.url, errors)
    expect(page.locator("#about")).to_contain_text("embedded", timeout=_WAIT_MS)
    ask(page, "Write three sentences about <b>cats</b>.")
    expect(page.locator("li.user .text")).to_have_text("Write three sentences about <b>cats</b>.")
    expect(page.locator("li.assistant .cost")).to_contain_text("tokens/s", timeout=_WAIT_MS)
    answer = page.locator("li.assistant .text").inner_text()
    assert len(answer.split()) > 5
    blocks = slotted.get("/page/state").json()["models"][0]["layers"]
    expect(page.locator("#layers svg")).to_have_count(len(blocks))
    expect(page.locator("#layers")).to_contain_text("%", timeout=_WAIT_MS)
    figures = dict(
        zip(
            page.locator("#figures dt").all_inner_texts(),
            page.locator("#figures dd").all_inner_texts(),
            strict=True,
        )
    )
    assert figures["Residency"].endswith("%")
    assert figures["Hit rate"].endswith("%")
    assert "exact" == figures["Mode"]
    if _PICTURES:
        page.screenshot(path=Path(_PICTURES) / "page.png")
    assert [] == errors
    page.close()


def test_an_answer_is_stopped_and_a_new_chat_begun(browser: Browser, slotted: Live) -> None:
    errors: list[str] = []
    page = opened(browser, slotted.url, errors)
    ask(page, "Write a long story about a cat and a dog, with many chapters.")
    expect(page.locator("li.assistant .text")).not_to_be_empty(timeout=_WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=_WAIT_MS)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#turns li")).to_have_count(0)
    assert [] == errors
    page.close()


def test_a_server_with_a_key_asks_for_it(browser: Browser, settings: Settings) -> None:
    with serve(replace(settings, keys=("the-key",))) as locked:
        page = opened(browser, locked.url, [])
        expect(page.locator("#summary")).to_contain_text("API key", timeout=_WAIT_MS)
        page.on("dialog", lambda dialog: dialog.accept("the-key"))
        page.get_by_role("button", name="API key").click()
        expect(page.locator("#about")).to_contain_text("embedded", timeout=_WAIT_MS)
        page.close()
