"""Who says what in a play, from a text of Project Gutenberg or the one file known as tiny Shakespeare.

Speakers are written in one of four ways; the way that gives a text the most headings is taken for it:

    HAMLET.           Ham.             THESEUS          First Citizen:
    Who's there?      Who's there?     Who's there?     Who's there?

The speech may also begin on the line of its heading. Left out are: what stands before the first act, prologue or
induction (the title, the list of persons), headings of acts and scenes with the place, stage directions in brackets,
and the frame of licence and advice around a text that is fresh from Project Gutenberg.

Known misses: a role under two names (Gloster, later King Richard) or with a misprinted one is two roles; those who
speak together (ALL, BOTH) are a role of their own; a bracket that is never closed takes the rest of its paragraph
along; the few stage directions without any bracket stay in the speech before them; names that are neither in capitals
nor ever alone on a line (`Ham. Who's there?` throughout) are not found.
"""

import re

FRAME = re.compile(r"\A.*^\*{3} ?START OF[^\n]*|^\*{3} ?END OF.*\Z", re.DOTALL | re.MULTILINE)
DIRECTION = re.compile(r"[\[{][^\[\]{}]*[\]}]")
NEVER_OPENED = re.compile(r"\A.*[\]}]", re.DOTALL)
NEVER_CLOSED = re.compile(r"[\[{].*\Z", re.DOTALL)
BEGINNING = re.compile(r"(?:THE )?(?:ACT \w+|PROLOGUE|INDUCTION)\b", re.IGNORECASE)
DIVISION = re.compile(r"(?:ACT|SCENE|INDUCTION|THE END)\b|(?:Act|Scene) (?:[IVX]+|\d+)\b")
OUTSIDE_THE_PLAY = re.compile(r"(?:THE )?(?P<name>PROLOGUE|EPILOGUE)\.?(?P<rest>)$")  # written so in plays of any way

CAPITALS = r"(?P<name>(?![IVX]+\.)(?:\d+ )?[A-Z][A-Z'&,. -]*[A-Z'])"
HEADINGS = (
    re.compile(CAPITALS + r"\.(?:$| (?P<rest>.*))"),
    re.compile(CAPITALS + r"(?P<rest>)$"),
    re.compile(r"(?P<name>(?:\d )?[A-Z][a-z]*(?: [A-Za-z][a-z]*){0,2})\.(?:$| (?P<rest>.*))"),
    re.compile(r"(?P<name>[A-Z][A-Za-z' -]+):(?P<rest>)$"),
)


def read_roles(text: str) -> dict[str, str]:
    """What each role says in all, its speeches in order and with their line ends; the names in capitals."""
    paragraphs = list_paragraphs(text)
    heading = max(HEADINGS, key=lambda heading: len(list_names(paragraphs, heading)))
    known, capitals = set(list_names(paragraphs, heading)), in_capitals(heading)
    spoken: dict[str, list[str]] = {}
    role = None
    for paragraph in paragraphs:
        for position, line in enumerate(paragraph):
            if line.rstrip(".") == "SONG":  # by whoever speaks
                continue
            if DIVISION.match(line):
                role = None
                continue
            if capitals or position == 0:
                found = heading.match(line) or OUTSIDE_THE_PLAY.match(line)
                if line.rstrip(".") in known:  # even where the full stop is missing, or one too many
                    role, line = line.rstrip("."), ""
                elif found and (capitals or found["name"] in known):
                    role, line = found["name"], found["rest"] or ""
            if role and line:
                spoken.setdefault(role.upper(), []).append(line)
    return {role: "\n".join(lines) for role, lines in spoken.items()}


def list_paragraphs(text: str) -> list[list[str]]:
    """The lines of each paragraph from the first act on, without stage directions and surplus spaces."""
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", FRAME.sub("", text)):
        lines = (" ".join(line.split()) for line in remove_directions(paragraph).split("\n"))
        if kept := [line for line in lines if line]:
            paragraphs.append(kept)
    start = next((i for i, paragraph in enumerate(paragraphs) if BEGINNING.match(paragraph[0])), 0)
    return paragraphs[start:]


def remove_directions(paragraph: str) -> str:
    while (shorter := DIRECTION.sub("", paragraph)) != paragraph:  # they may be nested
        paragraph = shorter
    return NEVER_CLOSED.sub("", NEVER_OPENED.sub("", paragraph))


def list_names(paragraphs: list[list[str]], heading: re.Pattern[str]) -> list[str]:
    """Each time that a speaker is named. Where not in capitals: alone on the first line, lest "Farewell." be a name."""
    capitals = in_capitals(heading)
    lines = (line for paragraph in paragraphs for line in (paragraph if capitals else paragraph[:1]))
    found = (heading.match(line) for line in lines if not DIVISION.match(line))
    return [match["name"] for match in found if match and (capitals or not match["rest"])]


def in_capitals(heading: re.Pattern[str]) -> bool:
    return heading.pattern.startswith(CAPITALS)
