"""Makes the golden data of t_tokenizer.c's folders: small tokenizers as transformers 5 saves them, trained on this
project's text, and tokens of the tokenizers library.

golden/tokenizers/NAME.json is a tokenizer.json; a line of golden/tokenizers.txt has its name, one or two texts in hex ("-"
is none), the tokens, and after "|" the types: "NAME hex hex 1 2 3 | 001".  With a folder as an argument, it writes the same
of 12,000 texts there instead, and of the whole map of NFKC.
"""
import base64
import json
import pathlib
import random
import re
import sys
import tempfile
import unicodedata

import sentencepiece
import transformers
from tokenizers import Tokenizer

import tokenizer as words

GOLDEN = pathlib.Path("tests/torch/golden")
CLASSES = {"bert": "BertTokenizerFast", "roberta": "RobertaTokenizerFast", "xlmr": "XLMRobertaTokenizerFast",
           "deberta": "DebertaV2TokenizerFast", "llama": "LlamaTokenizerFast", "qwen2": "Qwen2TokenizerFast"}
MARKS = ["[CLS]", "[SEP]", "[MASK]", " [MASK] ", "<s>", "</s>", "<mask>", "  <mask>  ", "<unk>", "<|endoftext|>", "▁", "Ġ", "'s",
         "'LL", "1234567", "<0x0A>", "\r\n\r\n", "!!\n\n", "don't", "ſ", "##"]
POOL = [*map(ord, "    \t\n\r\u00a0\u0300\u0301\u0308\u0327\u0345▁\u200d\u200c\u3000\u00ad\u1100\u1161\u11a8가éßİıẞſ中あ\u3099"), 0x1F600,
        0x1F468, 0xFF21, 0x5D0, 0x640, 0x915, 0x93F, 0x94D, 0x9BE, 0x1D400, 0xFFFD, 0x1B, 0x7F, 0x85, 0x2028, 0xFEFF, 0xBD, 0xFB01]


def texts(n, seed):
    rng, project = random.Random(seed), pathlib.Path("README.md").read_text() + pathlib.Path("examples/README.md").read_text()
    out = list(words.CASES) if n > 1000 else rng.sample(words.CASES, 16)
    while len(out) < n:
        kind = rng.randrange(4)
        if kind == 0:
            at = rng.randrange(len(project) - 200)
            out.append(project[at:at + rng.randrange(1, 90)])
        elif kind == 1:
            out.append("".join(chr(rng.choice(POOL) if rng.random() < 0.6 else rng.randrange(33, 127)) for _ in range(rng.randrange(1, 20))))
        elif kind == 2:
            codes = (rng.randrange(0x20, rng.choice([0x600, 0x3000, 0x30000])) for _ in range(rng.randrange(1, 25)))
            out.append("".join(chr(c) for c in codes if words.assigned(c) and not 0xF900 <= c < 0xFB00))
        else:
            out.append("".join(rng.choice(MARKS) if rng.random() < 0.5 else rng.choice([" ", "a", "the ", "\n", "é", "x1 ", "  "])
                               for _ in range(rng.randrange(1, 10))))
    return out


def charsmap(folder, whole):
    """SentencePiece's map of characters: NFKC's, or one of a few rules."""
    rules = pathlib.Path(folder) / "rules.tsv"
    pairs = {"e\u0301": "é", "ﬁ": "fi", "½": "1/2", "\t": " ", "\u3000": " ", "\u00ad": "", "Ａ": "A"}
    numbers = lambda text: " ".join(f"{ord(c):X}" for c in text)
    rules.write_text("".join(f"{numbers(was)}\t{numbers(now)}\n" for was, now in pairs.items()))
    pathlib.Path(folder, "text").write_text(pathlib.Path("README.md").read_text())
    more = {"normalization_rule_name": "nmt_nfkc"} if whole else {"normalization_rule_tsv": str(rules)}
    sentencepiece.SentencePieceTrainer.train(input=str(pathlib.Path(folder, "text")), model_prefix=str(pathlib.Path(folder, "m")),
                                             vocab_size=120, hard_vocab_limit=False, minloglevel=2, **more)
    from sentencepiece import sentencepiece_model_pb2
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(pathlib.Path(folder, "m.model").read_bytes())
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()


def train(name, corpus):
    made = getattr(transformers, CLASSES[name])().train_new_from_iterator(corpus, 400)
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        file = json.loads(pathlib.Path(folder, "tokenizer.json").read_text())
    if name == "llama":             # as a real one has it: bytes are tokens, and <s> begins
        vocab = file["model"]["vocab"]
        for byte in range(256):
            vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
        file["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                  {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                  {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                                  "special_tokens": {"<s>": {"id": "<s>", "ids": [vocab["<s>"]], "tokens": ["<s>"]}}}
    return file


def main():
    whole = len(sys.argv) > 1
    out = pathlib.Path(sys.argv[1]) if whole else GOLDEN
    text = pathlib.Path("README.md").read_text() + pathlib.Path("examples/README.md").read_text()
    corpus = (text + " größe naïve café Ελληνικά русский 中文字 " * 10).split("\n")
    (out / "tokenizers").mkdir(parents=True, exist_ok=True)
    files = {name: train(name, corpus) for name in CLASSES}
    with tempfile.TemporaryDirectory() as folder:
        files["mapped"] = json.loads(json.dumps(files["xlmr"]))
        files["mapped"]["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Precompiled", "precompiled_charsmap": charsmap(folder, whole)},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]}
    lines = []
    for name, file in files.items():
        path = out / "tokenizers" / f"{name}.json"
        path.write_text(json.dumps(file, ensure_ascii=False, separators=(",", ":")) + "\n")
        library = Tokenizer.from_file(str(path))
        library.no_truncation()
        library.no_padding()
        all_texts = texts(12000 if whole else 60, 7)
        for i, a in enumerate(all_texts):
            b = all_texts[i * 31 % len(all_texts)] if i % 5 == 0 else None
            e = library.encode(a, b) if b is not None else library.encode(a)
            parts = [name, *(x.encode().hex() if x else "+" if x == "" else "-" for x in (a, b)), *map(str, e.ids), "|", "".join(map(str, e.type_ids))]
            lines.append(" ".join(parts) + "\n")
    (out / "tokenizers.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
