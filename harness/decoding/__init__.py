"""How an answer is produced where a plain loop does not do: with a draft, or by denoising."""
