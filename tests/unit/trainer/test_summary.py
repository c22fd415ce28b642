"""What a reader sees of a run's answers."""

from lightrft.trainer.summary import question


def test_of_a_chat_prompt_the_last_message_of_the_user_is_shown() -> None:
    first = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert question(first + "<|im_start|>user\n2+2=?\nQuickly.<|im_end|>\n<|im_start|>assistant\n") == "2+2=?\nQuickly."


def test_any_other_prompt_is_shown_whole() -> None:
    assert question("What is 2+2?\nAnswer:") == "What is 2+2?\nAnswer:"
