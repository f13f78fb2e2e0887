"""Makes the golden data of the WordPiece tests: a small vocabulary, and texts with the tokens of transformers'
BertTokenizer.

A line is "cased hex-text tokens...".  `wordpiece.py --tables` prints the tables of characters in examples/wordpiece.h
instead.
"""
import pathlib
import random
import sys
import unicodedata

from tokenizers import normalizers, pre_tokenizers

GOLDEN = pathlib.Path("tests/torch/golden")
OTHER, MARK, DROPPED, SPACE, PUNCTUATION, IDEOGRAPH = range(6)
LATIN, EXTENDED, GREEK = (0xC0, 0x250), (0x1E00, 0x1F00), (0x1F00, 0x2000)     # folded by a string each

CASES = [
    "", " ", "\n\t", "hello world", "Hello, World!", "HELLO", "don't stop", "e-mail: a.b@c.de", "1,234.56", "x=1;y=2",
    "a  b\tc\r\nd", "unaffable", "the training of the models", "The loss-scaler's scale (65536) grows.", "[UNK]", "[CLS] a [SEP]",
    "Z\u00fcrich, Gr\u00f6\u00dfe, na\u00efve, \u0153uvre", "\u00c5ngstr\u00f6m \u00c9cole \u00d1and\u00fa \u0130stanbul", "e\u0301 = \u00e9", "a\u0308\u0301b",
    "\u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u03b3\u03c1\u03ac\u03bc\u03bc\u03b1\u03c4\u03b1 \u03a3\u03a3", "\u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0442\u0435\u043a\u0441\u0442 \u0451 \u0419",
    "Ti\u1ebfng Vi\u1ec7t \u0110\u1ea1i", "\u4e2d\u6587\u5b57\u7b26,\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002", "a\u4e2db", "\u304c\u304e\u30d0\u30d1", "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u05e2\u05d1\u05e8\u05d9\u05ea \u05b0\u05b1", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0661\u0662\u0663", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22", "\u09cb\u09cc",
    "\U0001d49c\U0001d505 \U00010348 \U00020000", "\U0001f600\U0001f600", "\ufeffBOM", "\ufffd x", "soft\u00adhyphen zero\u200bwidth", "\x00\x01a\x7f",
    "\u00a0nbsp\u3000wide\u2003em\u2028line", "\u00abquoted\u00bb \u201etext\u201c \u2026 \u2014", "$ ^ ` ~ + < > | =", "\u20ac \u00a3 \u00d7 \u00f7", "\u1fef\u037e\u2000", "a" * 100, "a" * 101,
    "\u00e4" * 100, "\u00e4" * 101, "b" * 99 + " " + "c" * 200, "\u01c5\u01c8 \u03f4 \u1e9e \u212a \u2126 \u212b", "\u24b6\uff21\uff41", "\u1f08\u1f80\u1fb4 \u1ffc",
]


def assigned(c):
    return unicodedata.category(chr(c)) not in ("Cn", "Cs")


def character_class(c, clean=normalizers.BertNormalizer(True, False, False, False), chinese=normalizers.BertNormalizer(False, True, False, False),
                    strip=normalizers.BertNormalizer(False, False, True, False), split=pre_tokenizers.BertPreTokenizer()):
    text = "a" + chr(c) + "a"
    if clean.normalize_str(text) == "aa":
        return DROPPED
    if clean.normalize_str(text) == "a a":
        return SPACE
    if strip.normalize_str(text) == "aa":
        return MARK
    if chinese.normalize_str(text) == f"a {chr(c)} a":
        return IDEOGRAPH
    return PUNCTUATION if len(split.pre_tokenize_str(text)) == 3 else OTHER


def class_runs():
    """(first character, class) of every run; what is not assigned goes with the characters before it."""
    runs = []
    for c in range(0x110000):
        if assigned(c) or c == 0xE000:
            kind = character_class(c)
            if not runs or kind != runs[-1][1]:
                runs.append((c, kind))
    return runs


def folds(lower=normalizers.BertNormalizer(False, False, True, True)):
    """What lower-casing and stripping accents make of characters that change; Hangul syllables follow a formula, and CJK
    compatibility ideographs are left out."""
    out = {}
    for c in range(0x80, 0x110000):
        if assigned(c) and not (0xAC00 <= c < 0xD7A4 or 0xF900 <= c < 0xFB00 or 0x2F800 <= c < 0x2FA20):
            text = lower.normalize_str(chr(c))
            if text not in ("", chr(c)):
                out[c] = [ord(x) for x in text]
    return out


def fold_runs(single):
    """(first, 2 count + step - 1, difference): step 2 leaves out characters that do not change."""
    runs, keys = [], sorted(single)
    while keys:
        first, best = keys[0], None
        for step in (1, 2):
            n = 1
            while single.get(first + n * step, 0) - (first + n * step) == single[first] - first and (step == 1 or first + n * step - 1 not in single):
                n += 1
            if best is None or n > best[0]:
                best = (n, step)
        n, step = best
        runs.append((first, 2 * n + step - 1, single[first] - first))
        taken = {first + k * step for k in range(n)}
        keys = [k for k in keys if k not in taken]
    return runs


def print_numbers(name, kind, numbers):
    print(f"static const {kind} {name}[] = {{")
    line = "   "
    for number in numbers:
        if len(line) + len(f" {number},") > 118:
            print(line)
            line = "   "
        line += f" {number},"
    print(line + "\n};")


def print_tables():
    fold = folds()
    letters = lambda c, base: chr(fold[c][0] - base + ord("a")) if base != ord("a") else chr(fold[c][0])
    for name, (begin, end), base, legal in (("piece_latin", LATIN, 97, range(97, 123)), ("piece_extended", EXTENDED, 97, range(97, 123)), ("piece_greek", GREEK, 0x3B1, range(0x3B1, 0x3CA))):
        text = ""
        for c in range(begin, end):
            hit = c in fold and len(fold[c]) == 1 and fold[c][0] in legal
            text += letters(c, base) if hit else "."
            if hit:
                del fold[c]
        print(f"static const char {name}[] =")
        for i in range(0, len(text), 112):
            print(f'    "{text[i:i + 112]}"' + (";" if i + 112 >= len(text) else ""))
    runs = fold_runs({c: v[0] for c, v in fold.items() if len(v) == 1})
    print_numbers("piece_folds", "int32_t", [n for run in runs for n in run])
    print_numbers("piece_pairs", "int32_t", [n for c, v in sorted(fold.items()) if len(v) == 2 for n in (c, *v)])
    print_numbers("piece_classes", "uint32_t", [first * 8 + kind for first, kind in class_runs()])


def vocabulary(texts):
    """Special tokens, every character that the texts have or become, and pieces of words."""
    pieces = "the train ##ing of model ##s loss scale ##r grow un ##aff ##able hello world stop mail zurich gro ##e naive don 65 ##53 ##6 ang ##strom".split()
    lower = normalizers.BertNormalizer(True, True, True, True)
    characters = sorted({x for text in texts for x in lower.normalize_str(text) + text if not x.isspace() and ord(x) > 32})
    characters = [c for c in characters if character_class(ord(c)) not in (DROPPED, MARK)]
    return ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *("##" + c for c in characters if character_class(ord(c)) == OTHER), *pieces]


def random_characters(rng, most):
    """Assigned characters, with a few spaces, but for CJK compatibility ideographs and marks whose order normalisation
    changes."""
    out = []
    while len(out) < 40:
        c = rng.choice([rng.randrange(0x250), rng.randrange(0x3100), rng.randrange(most)])
        if assigned(c) and not (0xF900 <= c < 0xFB00 or 0x2F800 <= c < 0x2FA20) and not unicodedata.combining(chr(c)) and len(folds_of(c)) < 3:
            out.append(chr(c))
    return "".join(out)


def folds_of(c, lower=normalizers.BertNormalizer(False, False, True, True)):
    return lower.normalize_str(chr(c)) if not 0xAC00 <= c < 0xD7A4 else ""


def main():
    from transformers import BertTokenizer
    rng = random.Random(1)
    texts = [t for t in CASES if "[CLS]" not in t and "[UNK]" not in t]         # BertTokenizer knows these as tokens
    texts += [random_characters(rng, 0x20000) for _ in range(60)]
    texts += ["".join(rng.choice("aA\u00e9\u00c4\u0142\u1ec7\u0416\u03b1\u4e2d\u304c.,- #'[\t") for _ in range(rng.randrange(1, 40))) for _ in range(100)]
    vocab = vocabulary(texts)
    (GOLDEN / "wordpiece_vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    ids = {token: i for i, token in enumerate(vocab)}
    with open(GOLDEN / "wordpiece.txt", "w", encoding="ascii") as out:
        for cased in (0, 1):
            tokenizer = BertTokenizer(vocab=ids, do_lower_case=not cased)
            for text in texts:
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                out.write(" ".join([str(cased), text.encode().hex() or "-", *map(str, tokens)]) + "\n")


if __name__ == "__main__":
    print_tables() if "--tables" in sys.argv else main()
