"""Work on texts that tenants write (templates, grammars) in processes that can be killed: limits of time and memory."""
