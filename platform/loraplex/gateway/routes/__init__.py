"""HTTP handlers of the gateway, one module per resource; they translate and delegate, rules live elsewhere."""
