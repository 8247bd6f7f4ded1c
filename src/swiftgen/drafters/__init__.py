"""Where drafts come from: the target's own draft passes, draft heads, and what stood in the text before."""
