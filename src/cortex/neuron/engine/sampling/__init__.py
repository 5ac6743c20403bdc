"""Drawing the next tokens: penalties, grammar masks, the sampler."""
