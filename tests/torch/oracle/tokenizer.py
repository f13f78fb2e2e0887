"""Makes the golden data of t_tokenizer.c: a small byte-level BPE trained on this project's text, and tokens of
transformers.

A line has a text, its tokens, and the lengths of the words that transformers gives: "hex-text n tokens... lengths...".
`tokenizer.py --classes` prints the table of character classes in examples/bpe.h instead, and `tokenizer.py --nfc` those
of examples/nfc.h.
"""
import glob
import json
import pathlib
import random
import sys
import unicodedata

GOLDEN = pathlib.Path("tests/torch/golden")
SPACES = {0x9, 0xA, 0xB, 0xC, 0xD, 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F,
          0x3000}
OTHER, LETTER, NUMBER, SPACE = range(4)

CASES = [
    "", " ", "  ", "   ", "\n", "\n\n", " \n", "\n ", "\t\tx", "a", " a", "  a", "a ", "a  ", "a   b", "a \n b", "a\n\n\nb",
    "trailing spaces   ", "tabs\tand\t\tspaces  \t end", "\r\nline\r\n", "\v\f\v", "x\u00a0y", "x\u2003\u2003y", "\u3000\u3000字",
    "\u0085", "\u200b\u200b", "\x1c\x1d", "\x00\x01", "I'm you're he'll we've she'd it's don't", "'s't're've'm'll'd", "'S 'T DON'T",
    "''s", " 's", "'", "'r", "'l", "l'l", "rock 'n' roll", "'ss'tt", "123", " 123 456", "a1b2c3", "3.14159", "x=1;y=2", "½ ² Ⅷ ٣ 四 ④",
    "Zürich, Größe, naïve, œuvre, ĳ", "Ελληνικά γράμματα", "Русский текст, ё", "中文字符,日本語のテキスト。", "한국어 텍스트",
    "עברית", "العربية ١٢٣", "हिन्दी में", "ภาษาไทย", "e\u0301 combining", "ªºµ", "ʰʱ ˈa", "𝒜𝔅 𐍈 𠀀", "😀", "😀😀 👨‍👩‍👧 🇨🇭", "a😀b 😀c",
    "\ufeffBOM", "\ufffd", "\uffff", "\U0010ffff", "<|endoftext|>", "a<|endoftext|>b", " <|endoftext|> ", "<|endoftext|><|endoftext|>",
    "<|endoftext|", "<<|endoftext|>>", "<|end", "aaaa", "aaaaa", "the the the", "==============================", "-" * 100, " " * 100,
    "/* ==== 1 Errors, time, signals ==== */", "static amp_result amp_open(amp_context **out, const amp_desc *desc);",
    "#include <stdio.h>\n\nint main(void) {\n    return 0;\n}\n", "$€£ + − × ÷ ≠ ∞", "«quoted» „text“ …", "\\n \\u0120 \"q\"", "Ġ Ċ ġ",
]


def character_class(c):
    kind = unicodedata.category(chr(c))
    return SPACE if c in SPACES else LETTER if kind[0] == "L" else NUMBER if kind[0] == "N" else OTHER


def assigned(c):
    return unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")


def class_runs():
    """(first character, class) of every run; what is not assigned goes with the characters before it."""
    runs = []
    for c in range(0x110000):
        if assigned(c) or c == 0xE000:      # private use starts with "other"
            kind = character_class(c)
            if not runs or kind != runs[-1][1]:
                runs.append((c, kind))
    return runs


def print_numbers(numbers):
    line = "   "
    for number in numbers:
        number = f" {number},"
        if len(line) + len(number) > 118:
            print(line)
            line = "   "
        line += number
    print(line)


def print_classes():
    print_numbers(first * 4 + kind for first, kind in class_runs())


def print_nfc():
    """(character, first, second, 1 if the two do not become it again), and (first, combining class) of runs."""
    parts = []
    for c in range(0x110000):
        split = unicodedata.decomposition(chr(c))
        if not split or split[0] == "<" or 0xF900 <= c < 0xFB00 or 0x2F800 <= c < 0x2FA20:
            continue
        first, *second = (int(x, 16) for x in split.split())
        parts += [c, first, second[0] if second else 0, int(unicodedata.normalize("NFC", chr(c)) != chr(c))]
    print_numbers(parts)
    print()
    runs = [(0, 0)]
    for c in range(0x110000):
        if unicodedata.combining(chr(c)) != runs[-1][1]:
            runs.append((c, unicodedata.combining(chr(c))))
    print_numbers(first * 256 + kind for first, kind in runs)


def boundary_texts():
    """Both sides of every class boundary between letters, numbers and symbols, so that the words show the class."""
    pieces = []
    for first, _ in class_runs():
        before = next((c for c in range(first - 1, 0, -1) if assigned(c)), 1)
        pieces += [f"a{chr(c)}1{chr(c)}!" for c in (before, first) if assigned(c)]
    return ["".join(pieces[i:i + 100]) for i in range(0, len(pieces), 100)]


def random_text(rng):
    """A mixture that visits every class and its neighbours."""
    pieces = [" ", "  ", "\n", "\t", "'", "'s", "'re", "the", "amp_", "é", "ß", "Ж", "λ", "字", "か", "😀", "1", "42", "٣", "-", "...", "\u00a0",
              "e\u0301", "<", "|", "="]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(1, 40)))


def random_characters(rng):
    """Assigned characters of all planes, with a few spaces."""
    out = []
    while len(out) < 60:
        c = rng.choice([rng.randrange(0x250), rng.randrange(0x3100), rng.randrange(0x20000)])
        if assigned(c):
            out.append(chr(c))
    return "".join(out)


def main():
    from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
    from transformers import GPT2TokenizerFast
    files = sorted(["README.md", *glob.glob("tests/*/t_m*.c"), "examples/quickstart.c", "examples/scaler_only.c"])
    trained = ByteLevelBPETokenizer()
    texts = [pathlib.Path(f).read_text(encoding="utf-8") for f in files] + CASES * 3     # contractions and other scripts
    trained.train_from_iterator(texts, vocab_size=900, min_frequency=2, special_tokens=["<|endoftext|>"],
                                show_progress=False)
    model = json.loads(trained.to_str())["model"]
    vocab = GOLDEN / "tokenizer_vocab.json"
    merges = GOLDEN / "tokenizer_merges.txt"
    vocab.write_text(json.dumps(model["vocab"]) + "\n")
    merges.write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in model["merges"]) + "\n")
    tokenizer = GPT2TokenizerFast(vocab=str(vocab), merges=str(merges))
    rng = random.Random(1)
    cases = CASES + boundary_texts() + [random_text(rng) for _ in range(150)]
    cases += [random_characters(rng) for _ in range(100)]
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with open(GOLDEN / "tokenizer.txt", "w", encoding="ascii") as out:
        for text in cases:
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text, text
            splits = words.pre_tokenize_str(text)
            lengths = [len(text[a:b].encode()) for _, (a, b) in splits]
            assert sum(lengths) == len(text.encode())
            out.write(" ".join([text.encode().hex() or "-", str(len(ids)), *map(str, ids), *map(str, lengths)]) + "\n")


if __name__ == "__main__":
    print_classes() if "--classes" in sys.argv else print_nfc() if "--nfc" in sys.argv else main()
