"""Users' prompts: requests for fairy tales, short and long, and follow-ups."""

from __future__ import annotations

from typing import Final

OPENINGS: Final = (
    "Tell me the story of a clever fox.",
    "Tell me the story of a king who had three sons.",
    "Tell me the story of a princess and a frog.",
    "Tell me a story about an old woman in the forest.",
    "Tell me the story of the miller's daughter.",
    "Tell me the story of a dragon who guarded a golden apple.",
    "Tell me a tale of two brothers, one rich and one poor.",
    "Tell me the story of the fisherman and his wife.",
    "Tell me the story of a little bird that could speak.",
    "Tell me a story about a soldier who came home from the war.",
    "Continue: Once upon a time there lived in the midst of a great forest a poor woodcutter with his wife.",
    "Continue: There was once a queen who had no children, and every day she looked out of her window and sighed.",
    "Continue: The wolf came to the door and knocked, and said in a soft voice: Let me in, dear children.",
    "Continue: Far away in the land to which the swallows fly in winter dwelt a king who had eleven sons and one "
    "daughter. The brothers, who were all princes, went to school with a star on their breast and a sword at their "
    "side. They wrote with diamond pencils upon slates of gold, and learned their lessons so quickly and read so "
    "easily that every one might know they were princes.",
)
FOLLOW_UPS: Final = ("And what happened then?", "Continue.", "How did it end?", "Tell me more of that.")
