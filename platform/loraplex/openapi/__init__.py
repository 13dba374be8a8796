"""The OpenAPI document of the gateway: every route, parameter, body, status and error code, made from typed data."""
