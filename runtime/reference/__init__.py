"""What a spec should give, computed a second time and another way: a Hugging Face forward in float32 on the CPU, with
reads and edits by hooks, formulas in float64.  It shares no kernel, row table or selector with the engines."""
