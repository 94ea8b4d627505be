import secrets
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest
from starlette.testclient import TestClient

from serving.known_recipe import FOODS, TEXT, TITLE, served_models
from toque.serving.model_app import build_model_app
from toque.serving.static_files import SITE as FOLDER

TOKEN = secrets.token_hex()


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(
        build_model_app(served_models(["soups", "other"], steps=0), token=TOKEN)
    ) as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


class _Addresses(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.found += [given[name] for name in ("src", "href") if name in given]
        if (
            (tag == "script" and "src" not in given)
            or tag == "style"
            or "style" in given
        ):
            self.inline.append(tag)
        self.inline += [name for name in given if name.startswith("on")]


def test_the_page_and_all_it_names_are_sent_without_a_token(client):
    answer = client.get("/", headers={"Authorization": ""})
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    page = _Addresses()
    page.feed(answer.text)
    assert page.inline == []
    addresses = {address for address in page.found if not address.startswith("#")}
    assert "page/app.js" in addresses
    for address in sorted(addresses):
        sent = client.get(f"/{address}", headers={"Authorization": ""})
        assert (sent.status_code, sent.headers["x-content-type-options"]) == (
            200,
            "nosniff",
        )


def test_no_file_of_the_page_names_another_address():
    texts = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.iterdir()}
    named = {name for name, text in texts.items() if "//" in text.replace("// ", "")}
    assert named == {"toque.svg"}  # its name space


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/../server.py", "/page/%2e%2e/app.py"]
)
def test_nothing_but_the_files_of_the_page_has_an_address(client, path):
    assert client.get(path).status_code == 404


def test_what_the_page_asks_needs_the_token(client):
    assert client.get("/api/models", headers={"Authorization": ""}).status_code == 401
    names = [model["name"] for model in client.get("/api/models").json()["models"]]
    assert names == ["soups", "other"]


@pytest.mark.parametrize(
    ("wish", "prompt"),
    [
        ({"dish": "Soup"}, "Generate recipe for: Soup"),
        (
            {
                "dish": "Soup: red",
                "style": "Quick",
                "ingredients": ["2 carrots", "salt"],
            },
            "Generate recipe for: Quick Soup, red using ingredients: carrots, salt",
        ),
    ],
)
def test_a_wish_becomes_the_prompt_the_model_was_trained_on(client, wish, prompt):
    answer = client.post("/api/prompt", json={"model": "soups", **wish})
    assert answer.json() == {"prompt": prompt}


def test_scores_and_what_was_missed_and_not_avoided(client):
    prompt = f"Generate recipe for: {TITLE} using ingredients: {', '.join(FOODS)}"
    asked = {"prompt": prompt, "text": TEXT, "avoid": ["carrot", "peanuts"]}
    found = client.post("/api/score", json=asked).json()
    assert found["requested"] == ["lentils", "saffron"]
    assert found["missing"] == ["saffron"]
    assert found["avoided"] == ["carrot"]
    assert found["scores"]["ingredient_coverage"] == 0.5
    assert found["hint"] == ""


def test_an_ingredient_that_only_the_steps_name_is_not_listed_and_is_bought(client):
    text = TEXT.replace("Season with", "Add lemon juice and season with")
    prompt = (
        f"Generate recipe for: {TITLE} using ingredients: lentils, lemon juice, saffron"
    )
    judged = client.post("/api/score", json={"prompt": prompt, "text": text}).json()
    assert (judged["missing"], judged["unlisted"]) == (["saffron"], ["lemon juice"])
    purchase = {
        "title": TITLE,
        "text": text,
        "servings": 2,
        "requested": judged["requested"],
    }
    items = client.post("/api/shopping-list", json=purchase).json()["items"]
    assert items[-1] == {
        "food": "lemon juice",
        "amounts": [],
        "note": "in the steps, not in the list",
    }
    assert [item["food"] for item in items].count("red lentils") == 1


def test_a_text_that_is_no_recipe_has_no_scores(client):
    answer = client.post("/api/score", json={"prompt": "Once", "text": "upon a time"})
    assert answer.json() == {
        "scores": {},
        "requested": [],
        "missing": [],
        "unlisted": [],
        "avoided": [],
        "hint": "",
    }


def test_a_class_is_the_models_where_it_learnt_the_task_and_else_the_rules(client):
    by = {}
    for model in ("soups", "other"):
        asked = {"model": model, "title": TITLE, "text": TEXT}
        by[model] = client.post("/api/classes", json=asked).json()["classes"]
    own, rule = (
        {each["task"]: each for each in by[model]} for model in ("soups", "other")
    )
    assert sum(own["difficulty"]["probabilities"].values()) == pytest.approx(1.0)
    assert set(own["difficulty"]["probabilities"]) == {"easy", "medium", "hard"}
    assert own["nutrition"] == rule["nutrition"]
    assert rule["difficulty"] == {
        "task": "difficulty",
        "answer": "easy",
        "probabilities": None,
    }
    nothing = {"model": "soups", "title": TITLE, "text": "Once upon a time."}
    assert client.post("/api/classes", json=nothing).json() == {"classes": []}


def test_a_question_longer_than_the_positions_is_left_to_the_rules(client):
    steps = "".join(f"\n{n}. Stir the soup." for n in range(1, 200))
    asked = {"model": "soups", "title": TITLE, "text": TEXT + steps}
    found = client.post("/api/classes", json=asked).json()["classes"]
    assert [each["probabilities"] for each in found] == [None, None]


def test_the_list_scales_from_what_the_recipe_makes(client):
    asked = {"title": TITLE, "text": TEXT}
    for servings, makes, lentils in (
        (2, None, "1½ cups"),
        (6, None, "4½ cups"),
        (6, 3, "3 cups"),
    ):
        body = {**asked, "servings": servings, "makes": makes}
        found = client.post("/api/shopping-list", json=body).json()
        assert found["makes"] == (makes or 2)
        assert found["items"][0] == {
            "food": "red lentils",
            "amounts": [lentils],
            "note": "",
        }
        assert found["items"][3] == {"food": "salt", "amounts": [], "note": "to taste"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/api/prompt", {"model": "soups", "dish": ""}, "dish"),
        (
            "/api/prompt",
            {"model": "soups", "dish": "Soup", "ingredients": ["a"] * 51},
            "ingredients",
        ),
        ("/api/prompt", {"model": "absent", "dish": "Soup"}, "model"),
        ("/api/score", {"prompt": "a", "text": "b" * 20_001}, "text"),
        ("/api/shopping-list", {"title": "a", "text": "b", "servings": 0}, "servings"),
        (
            "/api/classes",
            {"title": "a", "text": "b", "model": "soups", "more": 1},
            "more",
        ),
    ],
)
def test_a_wrong_field_is_named(client, path, body, param):
    answer = client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param
