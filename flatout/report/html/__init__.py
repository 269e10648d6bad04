"""One self-contained HTML page of the documents that tune, run, profile and memory wrote.

reading    parts of a document, each checked where it is read
svg        SVG elements, scales and ticks
charts     the charts, each drawn once for wide and once for narrow screens
blocks     what a section is made of
sections   from documents to sections
page       the page: template, styles, content security policy
"""
