"""Words for images: from the metadata, folder and file name of a clip art, or from an emoji's Unicode name."""

import html
import re
from collections.abc import Iterable

# Titles that name a collection, not what the picture shows; the file's name does then.
_COLLECTION = re.compile(
    r"collection|clipart by|\bhash\b|theme|aiga|symbol signs|etiquette icons|linked image|http|@", re.I
)
# Keywords that say nothing about the picture.
_NOISE = re.compile(
    r"hash|architetto|collection|^0x|^\d+$|united_nations|^mapsym$|^icons?$|theme|^signs?$|^signs_and|^unsorted$"
)
_CARD_RANKS = {"a": "ace", "k": "king", "q": "queen", "j": "jack"} | {
    str(i + 2): n for i, n in enumerate("two three four five six seven eight nine ten".split())
}
_CARD_SUITS = {"h": "hearts", "d": "diamonds", "c": "clubs", "s": "spades"}
_PLURALS = {"animals": "animal", "buildings": "building", "buttons": "button", "flags": "flag", "plants": "plant"}
_PLURALS |= {"tools": "tool", "shapes": "shape", "sports": "sport", "containers": "container", "homes": "home"}
_PLURALS |= {"vehicles": "vehicle", "birds": "bird", "dogs": "dog", "horses": "horse", "bugs": "insect"}
_PLURALS |= {
    "mammals": "mammal",
    "flowers": "flower",
    "trees": "tree",
    "arrows": "arrow",
    "logos": "logo",
    "toys": "toy",
}
_PLURALS |= {"housecats": "cat", "big_cats": "big cat", "bears": "bear", "dinosaurs": "dinosaur", "people": "person"}
_PLURALS |= {"smilies": "smiley", "stickmen": "stick man", "desserts": "dessert", "vegetables": "vegetable"}


_TONE = re.compile(r":? ?(?:medium-light|medium-dark|light|medium|dark) skin tone,?")


def family(name: str) -> str:
    """What names of variants share: emoji without skin tones, clip art without folders, numbers and last letter.

    Example::

        family("emoji/cook: dark skin tone"), family("clipart/animals/dogs/dog_03b")     # "emoji/cook", "animals/dog"
    """
    kind, *folders, stem = name.split("/")
    if kind == "emoji":
        return _TONE.sub("", name)
    return f"{folders[0]}/{re.sub(r'[_0-9]*[a-z]?$', '', stem)}"


def words(text: str) -> str:
    """Lower-case words: camelCase, digits and punctuation apart, nothing but letters and digits left."""
    text = html.unescape(text)
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    text = re.sub(r"['’`´]", "", text)
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def tag(svg: str, name: str) -> list[str]:
    """The texts of all ``<dc:name>`` in an SVG's metadata, markup removed."""
    found = re.findall(rf"<(?:\w+:)?{name}[^>]*>(.*?)</(?:\w+:)?{name}>", svg, re.S)
    return [re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", "", t))).strip() for t in found]


def license_of(svg: str) -> str:
    found = re.search(r'license [^>]*resource="([^"]*)"', svg)
    return found.group(1) if found else ""


def clip_art(path: str, svg: str, generic: Iterable[str]) -> tuple[str, list[str], str]:
    """(title, keywords, style) of ``folder/.../name`` with the text of its SVG.

    Args:
        path: relative, without suffix.
        svg: the file's text.
        generic: titles that many files share.
    """
    *folders, name = path.split("/")
    card = re.fullmatch(r"(bordered|ornamental|simple|white)_([hdcs])_(\w+)", name)
    if card and card.group(3) in _CARD_RANKS:
        rank, suit = _CARD_RANKS[card.group(3)], _CARD_SUITS[card.group(2)]
        return f"{rank} of {suit}", [suit, rank, card.group(1)], "playing card"
    work = re.search(r"<(?:\w+:)?Work.*?</(?:\w+:)?Work>", svg, re.S)
    meta = re.sub(r"<(?:\w+:)?Agent.*?</(?:\w+:)?Agent>", "", work.group(0) if work else "", flags=re.S)
    title = (tag(meta, "title") or [""])[0]
    if not title or title in generic or _COLLECTION.search(title):
        title = re.sub(r"(_\d*[a-z]?$)|(_v\.?\d.*$)", "", name)
    title = re.sub(r"\b(gnome|mime|stock|fs|dev|r|md|ganson|opencl\w*|architetto\w*|francesc\w*)\b", "", words(title))
    title = re.sub(r"\b\d+(?=[a-z]{3})|(?<=[a-z]{3})\d+\b|\b\d+\b", "", title)  # 3leftarrow, apple2: numbers of files
    keywords = [k for k in tag(meta, "li") if k and not _NOISE.search(k.lower())]
    keywords += [f for f in reversed(folders) if not _NOISE.search(f)]
    keywords = [_PLURALS.get(k.lower(), k) for k in keywords]
    style = "clip art"
    if "flags" in folders and "semaphore" not in folders:
        style, title = "flag", re.sub(r"\b(flag|of|the|national|usa)\b", "", title)
        title = "flag of " + title
    elif "icons" in folders:
        style = {"flat-theme": "gray icon", "lemon-theme": "lemon icon"}.get(
            folders[2] if len(folders) > 2 else "", "icon"
        )
    elif "aiga-symbols" in folders or "hazard" in folders or "roadsigns" in folders:
        style = "sign"
    return " ".join(title.split()), distinct(map(words, keywords), title), style


def distinct(keywords: Iterable[str], title: str) -> list[str]:
    """Keywords that repeat neither one another nor words of the title, at most eight."""
    seen, out = set(title.split()), []
    for k in keywords:
        if k and k not in out and not set(k.split()) <= seen:
            out.append(k)
    return out[:8]


def variants(title: str, keywords: list[str], style: str) -> list[str]:
    """Four ways to ask for one image; training draws among them.

    Example::

        variants("apple", ["fruit", "red"], "emoji")
        # ["apple emoji", "apple", "apple, fruit, red, emoji", "fruit, red, emoji"]
    """
    named = title if style == "flag" and title else f"{title} {style}".strip()
    everything = ", ".join(filter(None, [title, *keywords, style]))
    # Many titles are Italian or French, or name an artist's fancy: the keywords alone say what there is to see.
    return [named, title or everything, everything, ", ".join([*keywords, style]) if keywords else named]
