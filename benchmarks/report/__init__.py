"""The HTML report in a real browser: pictures to look at, requests, load time, accessibility."""
