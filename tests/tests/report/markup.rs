//! Checks that a page is well formed, without a browser.

/// Elements without an end tag.
const VOID: [&str; 3] = ["meta", "!doctype", "br"];

/// Faults of a page: mismatched tags, scripts, external requests, charts without text alternatives,
/// header cells without scope.
pub fn faults(page: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut open: Vec<&str> = Vec::new();
    let mut level = 0;
    for piece in page.split('<').skip(1) {
        let Some((tag, _)) = piece.split_once('>') else {
            faults.push(format!("`<{}` is not closed", &piece[..piece.len().min(40)]));
            continue;
        };
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or_default();
        if tag.starts_with('/') {
            if open.pop() != Some(name) {
                faults.push(format!("`</{name}>` closes no element"));
            }
        } else if !tag.ends_with('/') && !VOID.contains(&name.to_lowercase().as_str()) {
            open.push(name);
        }
        if let Some(heading) =
            name.strip_prefix('h').and_then(|digit| digit.parse::<u32>().ok()).filter(|_| !tag.starts_with('/'))
        {
            if heading > level + 1 {
                faults.push(format!("h{heading} follows h{level}"));
            }
            level = heading;
        }
        if ["script", "link", "img", "iframe", "object", "style src"].contains(&name) {
            faults.push(format!("a `{name}`"));
        }
        if name == "th" && !tag.starts_with('/') && !tag.contains("scope=") {
            faults.push("a th without scope".into());
        }
        for attribute in [" src=", " href=\"http", " onclick", " style="] {
            if tag.contains(attribute) {
                faults.push(format!("`{attribute}` in `<{tag}>`"));
            }
        }
    }
    if !open.is_empty() {
        faults.push(format!("not closed: {open:?}"));
    }
    let count = |word: &str| page.matches(word).count();
    if count("<svg") != count("<title>") - 1 || count("<svg") != count("<desc>") {
        faults.push("a chart without title or description".into());
    }
    if count("<figure>") != count("<figcaption>") || count("<figure>") > count("<table>") {
        faults.push("a figure without caption or table".into());
    }
    for anchor in page.split("href=\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
        if count(&format!(" id=\"{anchor}\"")) != 1 {
            faults.push(format!("#{anchor} does not exist exactly once"));
        }
    }
    if let Some(at) = page.find("NaN").or_else(|| page.find("\"inf")) {
        faults.push(format!("not a number: {}", page[at.saturating_sub(20)..].chars().take(50).collect::<String>()));
    }
    faults
}

#[test]
fn markup_errors_are_caught() {
    let page = |body: &str| format!("<!DOCTYPE html><html><head><title>x</title></head><body>{body}</body></html>");
    assert_eq!(faults(&page("<p id=\"a\">x</p><a href=\"#a\">y</a>")), Vec::<String>::new());
    for (body, words) in [
        ("<p>", "`</body>` closes no element"),
        ("<p><b></p></b>", "`</p>` closes no element"),
        ("<script>1</script>", "a `script`"),
        ("<svg></svg>", "a chart without"),
        ("<h3>x</h3>", "h3 follows h0"),
        ("<a href=\"#gone\">x</a>", "#gone does not exist"),
        ("<p onclick=\"x\">x</p>", " onclick"),
        ("<table><tr><th>x</th></tr></table>", "th without scope"),
    ] {
        let found = faults(&page(body));
        assert!(found.iter().any(|fault| fault.contains(words)), "{body}: {found:?}");
    }
}
