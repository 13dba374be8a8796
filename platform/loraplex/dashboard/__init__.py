"""The dashboard: pages for administrators and for tenants, served by the gateway below /ui/.

It knows the gateway's parts and calls them as the API's routes do, in the name of whoever logged in; the gateway knows
nothing of it.
"""
