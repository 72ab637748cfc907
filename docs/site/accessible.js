// What the theme leaves out: a box that scrolls can be reached by the keyboard, lists of links have
// names of their own, and what has no text is no link, no landmark
// and no heading.
window.addEventListener("load", () => {
  const all = (selector) => document.querySelectorAll(selector);
  for (const box of all(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  for (const list of all(".md-path")) list.ariaLabel = "Path of this page";
  for (const list of all(".md-nav--primary")) list.ariaLabel = "Pages";
  for (const list of all(".md-nav--primary .md-nav--secondary")) list.ariaLabel = "Parts of this page";
  for (const line of all("a[id^=__codelineno]")) line.removeAttribute("href");
  for (const corner of all("th:empty")) corner.replaceWith(document.createElement("td"));
  for (const buttons of all(".md-code__nav")) buttons.role = "none";
});
