"""Compiled inner loops, each the twin of some lines of numpy or Python that do the same where no compiler was at hand."""
