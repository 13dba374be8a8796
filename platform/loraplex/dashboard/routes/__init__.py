"""The pages of the dashboard, a module each, which builds its routes and says what stands in the menu."""
