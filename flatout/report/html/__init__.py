"""One self-contained HTML page of the documents that tune, run, profile and memory wrote.

reading    parts of a document, each checked where it is read
charts     the charts as SVG, each drawn once for wide and once for narrow screens
blocks     what a section is made of
tables     cells, heads and figures that several sections have
sections   from documents to sections
page       the page: template, styles, content security policy
"""
