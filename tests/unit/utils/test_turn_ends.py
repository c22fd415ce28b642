import pytest

from lightrft.models.tiny.text import tiny_tokenizer
from lightrft.utils.chat_template import turn_ends
from tests.unit.datasets.published_templates import PUBLISHED


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_ends_of_turns_of_published_formats_are_found_by_rendering(name):
    format = PUBLISHED[name]
    tokenizer = format.tokenizer()
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer).ids) == list(format.ends)


def test_a_tokenizer_without_a_template_ends_no_turn():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert turn_ends(tokenizer).ids == ()


def test_another_template_of_the_same_tokenizer_has_its_own_ends():
    tokenizer = PUBLISHED["chatml"].tokenizer()
    assert turn_ends(tokenizer).ids
    tokenizer.chat_template = PUBLISHED["alpaca"].template
    assert turn_ends(tokenizer).ids == () and turn_ends(tokenizer).is_open


def test_a_template_that_reads_only_parts_ends_its_turns_too():
    template = PUBLISHED["chatml"].template.replace("m['content']", "m['content'][0]['text']")
    tokenizer = tiny_tokenizer(chat_template=template)
    assert tokenizer.convert_ids_to_tokens(turn_ends(tokenizer).ids) == ["<|im_end|>"]
