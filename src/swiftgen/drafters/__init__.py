"""Where drafts come from: the target's own draft pass with linear heads, and n-grams of the text."""
