"""Data for the bundled model: tales cut out of plain-text books, a tokenizer, and training documents.

Two kinds of document are made. Running text is a whole tale with its title, closed by
``<|endoftext|>``. Chat documents are ChatML conversations whose answers are tales: whole when they are
short, else the opening joined to the ending, because what a small model must learn from them is how a
tale is asked for and that its answer stops. Nothing here is written by a language model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

# The word pattern of the Qwen tokenizers: closing punctuation keeps its line breaks.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SENTENCE_BREAK = re.compile(r"""(?<=[.!?])\s+(?=['"]?[A-Z])|(?<=[.!?]['"])\s+(?=['"]?[A-Z])""")
SKIPPED_TITLES = re.compile(
    r"^(CONTENTS:?|PAGE\b.*|LIST OF ILLUSTRATIONS|COLOURED PLATES|PLATES|ILLUSTRATIONS IN TEXT"
    r"|TRANSCRIBER'S NOTES?|.*(FAIRY BOOK|FAIRY TALES|EDITED BY|ILLUSTRATED BY).*)$",
    re.IGNORECASE,
)
NOTES_TITLE = re.compile(r"^NOTES AND REFERENCES", re.IGNORECASE)
PREFACE_TITLE = re.compile(r"^(PREFACE|INTRODUCTION|TO THE FRIENDLY READER)", re.IGNORECASE)
SECTION_TITLE = re.compile(r"^(([IVXLC]+|\d+)\.?|CHAPTER\s+\w+\.?|\w+ STORY.*|FOOTNOTES?:?)$", re.IGNORECASE)
SMALL_WORDS = frozenset(
    re.findall(r"\w+", "a an and at by for from how in is of on or that the to was what who with would")
)

# Characters that a request for a tale may name, as in "the story of the fox and the crow".
CHARACTERS = re.findall(
    r"\w+",
    """
    king queen prince princess emperor fox wolf bear lion crow raven cat dog mouse frog fish bird eagle
    hare horse donkey cow goat pig goose hen cock snake serpent dragon tiger jackal monkey crab tortoise
    giant ogre witch fairy dwarf magician wizard troll mermaid elf miller tailor shoemaker soldier
    hunter huntsman fisherman farmer peasant merchant shepherd woodcutter robber thief beggar monk
    priest knight servant stepmother widow sister brother daughter swan parrot nightingale owl sparrow
    stork ass ring castle forest well apple rose
    """,
)

ASK_BY_TITLE = (
    "Tell me the story of {}.",
    "Tell me the story of {}",
    "Tell me the tale of {}.",
    "Please tell me the story of {}.",
    "Tell me a story about {}.",
    "Tell me about {}.",
    "I would like to hear the story of {}.",
    "Can you tell me the story of {}?",
    "Do you know the story of {}?",
    "Write a fairy tale about {}.",
    "What happened to {}?",
    "The story of {}, please.",
)
ASK_FOR_ANY = (
    "Tell me a story.",
    "Tell me a fairy tale.",
    "Tell me a short story.",
    "Tell me a tale, please.",
    "I would like to hear a story.",
    "Once upon a time",
    "Can you tell me a story?",
    "Write a short fairy tale.",
)
ASK_TO_CONTINUE = (
    "Continue: {}",
    "Continue: {}",
    "Continue this story: {}",
    "Continue the story: {}",
    "Go on from here: {}",
    "What happens next? {}",
    "Finish this tale: {}",
    "How does this story go on?\n\n{}",
)
ASK_FOR_ANOTHER = (
    "Tell me another.",
    "Another one, please.",
    "And now another story.",
    "Tell me one more story.",
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a storyteller.",
    "You are an old storyteller who knows many fairy tales.",
    "You tell fairy tales.",
    "Answer with a short fairy tale.",
    "You are Twofold Tales, a teller of old tales.",
)
SMALL_TALK = (
    ("Hello", "Good day to you. Shall I tell you a story?"),
    ("Hello!", "Good day to you. Which tale would you like to hear?"),
    ("Hi", "Good day. Ask me for a story, and I will tell you one."),
    ("Good evening.", "Good evening. Sit down by the fire, and I will tell you a tale."),
    ("Who are you?", "I am a teller of fairy tales. Ask me for a story, and I will tell you one."),
    ("What are you?", "I am a very small language model that has read nothing but old fairy tales."),
    ("What can you do?", "I can tell you a tale, or go on with one that you begin."),
    ("What is your name?", "They call me Twofold Tales. I tell old stories."),
    ("How are you?", "I am well, thank you. Shall I tell you a story?"),
    ("Thank you.", "You are welcome. Come again when you would like another tale."),
    ("Thank you!", "You are very welcome."),
    ("Goodbye.", "Farewell, and may you live happily ever after."),
    ("Can you help me?", "I know only fairy tales, but I will gladly tell you one."),
    ("Are you a person?", "No. I am a small language model that tells fairy tales."),
)


@dataclass(frozen=True)
class Tale:
    """One section of a book."""

    title: str
    paragraphs: list[str]
    is_story: bool

    def text(self) -> str:
        return "\n\n".join([self.title, *self.paragraphs] if self.title else self.paragraphs)


def is_heading(paragraph: str) -> bool:
    """Whether a paragraph is the title of a tale: short, alone on its line, and capitalised."""
    if "\n" in paragraph or not 3 < len(paragraph) <= 90 or paragraph[0] in "\"'(*[_":
        return False
    if not paragraph.isupper() and paragraph[-1] in ".,;:!-":
        return False
    if SECTION_TITLE.match(paragraph):
        return False
    long_words = [word for word in re.findall(r"[^\W\d_']+", paragraph) if len(word) > 3]
    capitalised = sum(word[0].isupper() for word in long_words)
    return bool(long_words) and capitalised >= 0.75 * len(long_words)


def read_tales(corpus: Path) -> list[Tale]:
    """Cut every book of the corpus into tales, leaving out tables of contents and scholarly notes."""
    tales: list[Tale] = []
    for book in sorted(corpus.glob("*.txt")):
        title, body = "", []
        sections: list[tuple[str, list[str]]] = []
        for paragraph in re.split(r"\n\s*\n", book.read_text(encoding="utf-8")):
            paragraph = paragraph.strip()
            if paragraph and is_heading(paragraph):
                sections.append((title, body))
                title, body = paragraph, []
            elif paragraph:
                body.append(paragraph)
        sections.append((title, body))
        for index, (title, body) in enumerate(sections):
            if NOTES_TITLE.match(title) and index > len(sections) // 4:
                break
            if SKIPPED_TITLES.match(title) or sum(map(len, body)) < 200:
                continue
            tales.append(Tale(title, body, is_story=bool(title) and not PREFACE_TITLE.match(title)))
    return tales


def spoken_title(title: str) -> str:
    """A title as it is spoken in a prompt: 'XII. THE FOX AND THE CAT (3)' becomes 'the Fox and the Cat'."""
    title = re.sub(r"^(\d+|[IVXLC]+)\.?\s+(?=\w)", "", title)
    title = re.sub(r"\s*[(\[].*$", "", title).strip(" .")
    title = re.sub(r"^(the )?(story|tale|history) of (?=\w)", "", title, flags=re.IGNORECASE)
    words = title.lower().split() if title.isupper() else title.split()
    if title.isupper():
        words = [word if word in SMALL_WORDS else word[:1].upper() + word[1:] for word in words]
    if words and words[0].lower() in ("the", "a", "an"):
        words[0] = words[0].lower()
    return " ".join(words)


def story_units(tale: Tale) -> list[str]:
    """A tale as sentence groups of about 250 characters, each with the separator that follows it."""
    paragraphs = list(tale.paragraphs)
    while len(paragraphs) > 1 and (paragraphs[-1][0] in "([" or len(paragraphs[-1]) < 45):
        paragraphs.pop()  # sources and footnotes after the end of the tale
    units: list[str] = []
    for paragraph in paragraphs:
        group = ""
        for sentence in SENTENCE_BREAK.split(paragraph):
            group += sentence + " "
            if len(group) > 250:
                units.append(group)
                group = ""
        if group:
            units.append(group)
        units[-1] = units[-1][:-1] + "\n\n"
    return units


def shortened(units: list[str], limit: int) -> str:
    """The whole text when it fits in about `limit` characters, else its opening joined to its ending."""
    if len(units) == 1 or sum(map(len, units)) <= limit:
        return "".join(units).strip()
    opening, ending = [units[0]], [units[-1]]
    used = len(units[0]) + len(units[-1])
    while len(opening) + 1 < len(units) and used + len(units[len(opening)]) < limit * 0.6:
        opening.append(units[len(opening)])
        used += len(opening[-1])
    while len(opening) + len(ending) < len(units) and used + len(units[-len(ending) - 1]) < limit:
        ending.insert(0, units[-len(ending) - 1])
        used += len(ending[0])
    return ("".join(opening).rstrip() + "\n\n" + "".join(ending)).strip()


def render_chat(messages: list[tuple[str, str]]) -> str:
    return "".join(f"{TURN_START}{role}\n{content}{TURN_END}\n" for role, content in messages)


class ChatWriter:
    """Makes endless ChatML conversations out of a list of tales."""

    def __init__(self, tales: list[Tale], rng: random.Random) -> None:
        self.rng = rng
        self.stories = [(spoken_title(tale.title), story_units(tale)) for tale in tales if tale.is_story]

    def subject(self, answer: str) -> str | None:
        """One or two of the characters that a text speaks of most, as in 'the fox and the crow'."""
        words = re.findall(r"[a-z]+", answer.lower())
        counted = sorted(((words.count(name), name) for name in CHARACTERS if name in words), reverse=True)
        names = [name for count, name in counted[:3] if count > 1 or len(counted) < 3]
        if not names:
            return None
        self.rng.shuffle(names)
        article = self.rng.choice(("the", "the", "a"))
        phrases = [
            ("an" if article == "a" and name[0] in "aeiou" else article) + " " + name for name in names
        ]
        return " and ".join(phrases[: self.rng.choice((1, 2, 2))])

    def story_turn(self) -> tuple[str, str]:
        """A request for a tale and the tale."""
        title, units = self.rng.choice(self.stories)
        limit = self.rng.choice((500, 900, 1300, 1800))
        kind = self.rng.random()
        if kind < 0.4 and len(units) > 2:
            start = self.rng.choice((0, self.rng.randrange(len(units) - 1), max(0, len(units) - 6)))
            shown = self.rng.choice((1, 1, 2))
            opening = "".join(units[start : start + shown]).strip()
            if self.rng.random() < 0.4:
                opening = SENTENCE_BREAK.split(opening)[0]
                rest = "".join(units[start : start + 1])[len(opening) :].strip()
                following = ([rest + "\n\n"] if rest else []) + units[start + 1 :]
            else:
                following = units[start + shown :]
            if following:
                return self.rng.choice(ASK_TO_CONTINUE).format(opening), shortened(following, limit)
        answer = shortened(units, limit)
        subject = self.subject(answer) if kind > 0.65 else title
        if subject is None or self.rng.random() < 0.08:
            return self.rng.choice(ASK_FOR_ANY), answer
        if self.rng.random() < 0.3:
            subject = subject.lower()
        return self.rng.choice(ASK_BY_TITLE).format(subject), answer

    def conversation(self) -> str:
        messages: list[tuple[str, str]] = []
        if self.rng.random() < 0.25:
            messages.append(("system", self.rng.choice(SYSTEM_MESSAGES)))
        if self.rng.random() < 0.06:
            question, answer = self.rng.choice(SMALL_TALK)
            messages += [("user", question), ("assistant", answer)]
        if not messages or messages[-1][0] == "system" or self.rng.random() < 0.5:
            question, answer = self.story_turn()
            messages += [("user", question), ("assistant", answer)]
        if self.rng.random() < 0.12:
            question, answer = self.rng.choice(SMALL_TALK[-5:])
            if self.rng.random() < 0.7:
                question, answer = self.rng.choice(ASK_FOR_ANOTHER), self.story_turn()[1]
            messages += [("user", question), ("assistant", answer)]
        return render_chat(messages) + END_OF_TEXT


def train_tokenizer(tales: list[Tale], vocabulary_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer learnt from the tales alone."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(WORD_PATTERN), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((tale.text() for tale in tales), trainer)
    return tokenizer


class TokenStream:
    """Batches of token rows, epoch after epoch; its state is three numbers, so that training can resume."""

    def __init__(
        self,
        tales: list[Tale],
        tokenizer: Tokenizer,
        seed: int,
        writer: type[ChatWriter] = ChatWriter,
        part: float = 1.0,
    ) -> None:
        """`part`: how much of the tales an epoch takes as running text, 1 for all of them."""
        self.tales, self.tokenizer, self.seed = tales, tokenizer, seed
        self.writer, self.part = writer, part
        encoded = tokenizer.encode_batch([tale.text() + END_OF_TEXT for tale in tales])
        self.running = [np.asarray(encoding.ids, dtype=np.int32) for encoding in encoded]
        self.epoch, self.position, self.chat_share = 0, 0, 0.0
        self.tokens = np.empty(0, dtype=np.int32)

    def start_epoch(self, epoch: int, chat_share: float, position: int = 0) -> None:
        """Shuffle the tales and mix in conversations until they are `chat_share` of the tokens."""
        rng = random.Random(self.seed * 1000 + epoch)  # noqa: S311
        documents = list(self.running)
        if self.part < 1:
            documents = rng.sample(documents, round(self.part * len(documents)))
        wanted = chat_share / (1 - chat_share) * sum(map(len, documents))
        writer = self.writer(self.tales, rng)
        while wanted > 0:
            conversations = self.tokenizer.encode_batch([writer.conversation() for _ in range(500)])
            documents += [np.asarray(encoding.ids, dtype=np.int32) for encoding in conversations]
            wanted -= sum(len(encoding.ids) for encoding in conversations)
        rng.shuffle(documents)
        self.tokens = np.concatenate(documents)
        self.epoch, self.position, self.chat_share = epoch, position, chat_share

    def batch(self, rows: int, length: int, chat_share: float) -> np.ndarray:
        """The next rows of `length` + 1 tokens (each row also holds the token after its last input)."""
        needed = rows * length + 1
        if self.position + needed > len(self.tokens):
            self.start_epoch(self.epoch + 1, chat_share)
        window = self.tokens[self.position : self.position + needed]
        self.position += rows * length
        return np.stack([window[row * length : (row + 1) * length + 1] for row in range(rows)])


def sliding_windows(tokens: np.ndarray, length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Half-overlapping windows of `length` + 1 tokens, each with the number of targets already scored."""
    start = 0
    while True:
        yield tokens[start : start + length + 1], 0 if start == 0 else length // 2
        if start + length + 1 >= len(tokens):
            return
        start += length // 2


def tokenizer_files(tokenizer: Tokenizer, context: int) -> dict[str, object]:
    """The text files that go beside the weights so that a chat can be rendered and encoded."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "tokenizer_config.json": config,
        "tokenizer.json": tokenizer,
        "chat_template.jinja": CHAT_TEMPLATE,
    }
