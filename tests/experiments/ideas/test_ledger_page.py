from folio.experiments.ideas import ledger
from folio.experiments.ideas.ledger_page import write_page


def test_the_page_shows_the_words_of_an_idea_as_text(tmp_path):
    arm = {"name": "x", "commit": None, "hash": "1", "options": []}
    fields = {"note": "<script>alert(1)</script>", "config": "mine.py", "a": arm, "b": arm, "verdict": "undecided"}
    ledger.append(tmp_path, ledger.new_entry("001-x", ledger.now(), **fields, losses=[(2.0, 1.0)], difference=-1.0))
    html = write_page(tmp_path).read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html and "kept: 0 of 1 idea" in html
