"""Conversations for the last, short training of the bundled model: answers that are brief and that end.

What it is: a writer of ChatML conversations beside ``tales_data.ChatWriter``, whose answers have about 60
to 350 tokens, name the characters asked for near their beginning, and end where a tale or a paragraph does.

What it is not: new text. Every answer is cut out of the training books, but for the greetings.
"""

from __future__ import annotations

import random

from tales_data import (
    ASK_BY_TITLE,
    ASK_FOR_ANOTHER,
    ASK_FOR_ANY,
    ASK_TO_CONTINUE,
    END_OF_TEXT,
    SENTENCE_BREAK,
    SMALL_TALK,
    SYSTEM_MESSAGES,
    ChatWriter,
    Tale,
    render_chat,
    shortened,
)

LONGEST_ANSWER = 1400  # characters: 350 tokens
ANSWER_LIMITS = (400, 600, 800, 1000, 1200, 1400)
WHOLE_SHARE, CONTINUE_SHARE, SMALL_TALK_SHARE = 0.12, 0.38, 0.10


def through_a_paragraph(units: list[str], limit: int) -> str:
    """The units from the first on, as far as the last paragraph's end within about `limit` characters.

    A first paragraph that is longer than that is taken whole, so that the text never breaks off.
    """
    text, used = "", ""
    for unit in units:
        used += unit
        if unit.endswith("\n\n"):
            if text and len(used) > limit:
                break
            text = used
    return (text or used).strip()


class ShortChatWriter(ChatWriter):
    """Makes conversations whose answers are short; see the module."""

    def __init__(self, tales: list[Tale], rng: random.Random) -> None:
        super().__init__(tales, rng)
        self.whole = [story for story in self.stories if sum(map(len, story[1])) <= LONGEST_ANSWER]

    def continuation(self) -> tuple[str, str] | None:
        """A request to go on with a tale, and what follows there; None where too much or nothing follows."""
        _, units = self.rng.choice(self.stories)
        start = self.rng.choice((0, 0, self.rng.randrange(len(units)), max(0, len(units) - 5)))
        opening, following = units[start], units[start + 1 :]
        if self.rng.random() < 0.6:
            first = SENTENCE_BREAK.split(opening)[0].strip()
            rest = opening[opening.index(first) + len(first) :].lstrip()
            opening, following = first, ([rest] if rest else []) + following
        answer = through_a_paragraph(following, self.rng.choice(ANSWER_LIMITS)) if following else ""
        if not 40 < len(answer) <= LONGEST_ANSWER:
            return None
        return self.rng.choice(ASK_TO_CONTINUE).format(opening.strip()), answer

    def new_tale(self) -> tuple[str, str] | None:
        """A request for a tale and a short form of it; None where its paragraphs are too long for one."""
        whole = self.whole and self.rng.random() < WHOLE_SHARE
        title, units = self.rng.choice(self.whole if whole else self.stories)
        answer = shortened(units, self.rng.choice(ANSWER_LIMITS))
        if not 200 < len(answer) <= LONGEST_ANSWER:
            return None
        kind = self.rng.random()
        # Characters of the first sentences, so that what was asked for is what the answer begins with.
        subject = title if kind < 0.3 else self.subject(answer[:400]) if kind < 0.8 else None
        if subject is None:
            return self.rng.choice(ASK_FOR_ANY), answer
        if self.rng.random() < 0.3:
            subject = subject.lower()
        return self.rng.choice(ASK_BY_TITLE).format(subject), answer

    def story_turn(self) -> tuple[str, str]:
        """A request for a tale or for its continuation, and the answer."""
        while True:
            turn = self.continuation() if self.rng.random() < CONTINUE_SHARE else self.new_tale()
            if turn:
                return turn

    def small_talk(self) -> tuple[str, str]:
        """A greeting or a question about the model, typed more or less carefully."""
        question, answer = self.rng.choice(SMALL_TALK)
        if self.rng.random() < 0.2:
            question = question.lower()
        if self.rng.random() < 0.2:
            question = question.rstrip(".!?")
        return question, answer

    def conversation(self) -> str:
        messages: list[tuple[str, str]] = []
        if self.rng.random() < 0.2:
            messages.append(("system", self.rng.choice(SYSTEM_MESSAGES)))
        talk = self.rng.random() < SMALL_TALK_SHARE
        question, answer = self.small_talk() if talk else self.story_turn()
        messages += [("user", question), ("assistant", answer)]
        if talk and self.rng.random() < 0.3:
            question, answer = self.story_turn()
            messages += [("user", question), ("assistant", answer)]
        elif self.rng.random() < 0.08:
            messages += [("user", self.rng.choice(ASK_FOR_ANOTHER))]
            messages += [("assistant", self.story_turn()[1])]
        return render_chat(messages) + END_OF_TEXT
