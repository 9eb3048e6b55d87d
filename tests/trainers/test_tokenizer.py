import pytest

from moemb.trainers.tokenizer import EMB, SPECIAL_TOKENS, load_tokenizer, train_tokenizer, training_texts


def test_special_tokens_are_the_last_ids_and_emb_the_very_last(fake_tokenizer):
    ids = fake_tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert ids == list(range(312, 320))
    assert len(fake_tokenizer) == 320
    assert fake_tokenizer.convert_tokens_to_ids(EMB) == 319


def test_a_word_has_one_token_sequence_wherever_it_stands(fake_tokenizer):
    def ids(text):
        return fake_tokenizer(text, add_special_tokens=False).input_ids

    assert ids("thing number")[-len(ids("number")) :] == ids("number")
    assert ids("Thing") == ids("thing")


def test_every_text_is_tokenized_without_unknown_token(fake_tokenizer):
    for text in ("漢字 🍎", "नमस्ते", "\x00\x7f", "a\ud7ffb", ""):
        assert None not in fake_tokenizer(text, add_special_tokens=False).input_ids


def test_saved_tokenizer_gives_the_same_ids(fake_tokenizer, tmp_path):
    fake_tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = "Thing  number\n7<emb>tail"
    assert again(text).input_ids == fake_tokenizer(text).input_ids


def test_training_texts_are_of_the_training_split_only(fake_corpus):
    texts = set(training_texts(fake_corpus))
    assert "thing number 0" in texts and "fr thing number 0" in texts and "icon 3" in texts
    assert "thing number 23" not in texts and "meaning of word 12" not in texts


def test_pairs_are_capped(fake_corpus):
    few = [text for text in training_texts(fake_corpus, pairs_per_source=2) if text.startswith("meaning")]
    assert len(few) == 4  # two sources


def test_too_few_texts_are_an_error():
    with pytest.raises(ValueError, match="lower vocab_size"):
        train_tokenizer(["a b"], vocab_size=4096)


def test_loading_names_missing_special_tokens(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="<emb>"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="absent holds no tokenizer"):
        load_tokenizer(tmp_path / "absent")
