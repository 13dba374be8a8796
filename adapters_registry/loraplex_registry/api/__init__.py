"""The registry over HTTP: routes, who may call them, and errors as JSON. Decides nothing about adapters."""
