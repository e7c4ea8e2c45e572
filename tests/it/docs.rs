//! What is written for people, held to what the program does.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use crate::support::{Finished, Gateway, run, tollgate, tree};

/// The page of all settings.
const CONFIGURATION: &str = "docs/reference/configuration.md";

/// A line of a Markdown file outside or inside a block of code.
struct Line {
    number: usize,
    text: String,
    /// The word behind the opening fence, or nothing for an unmarked block; `None` outside of blocks.
    block: Option<String>,
}

fn lines(document: &str) -> Vec<Line> {
    let mut block: Option<String> = None;
    let mut lines = Vec::new();
    for (at, text) in tree::text(document).lines().enumerate() {
        match text.trim_start().strip_prefix("```") {
            Some(_) if block.is_some() => block = None,
            Some(word) => block = Some(word.to_owned()),
            None => lines.push(Line { number: at + 1, text: text.to_owned(), block: block.clone() }),
        }
    }
    lines
}

/// Everything that people read first: the pages at the root, below `docs/`, and the contract of the script.
fn documents() -> Vec<String> {
    let mut documents = tree::files("docs", ".md");
    documents.extend(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "lua/README.md"].map(str::to_owned));
    documents
}

/// The texts between backticks in a line.
fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// The settings in TOML text by their dotted paths, each with its value as written. A setting in a comment, such as
/// `# token = "..."`, has no default; its value is `None`.
fn settings<'a>(lines: impl Iterator<Item = &'a str>) -> BTreeMap<String, Option<String>> {
    let mut section = String::new();
    let mut found = BTreeMap::new();
    for line in lines {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_start_matches('[').split(']').next().unwrap_or_default().to_owned();
            continue;
        }
        let (line, commented) = match line.strip_prefix("# ") {
            Some(rest) => (rest, true),
            None => (line, false),
        };
        let Some((key, value)) = line.split_once(" = ") else { continue };
        let is_key =
            |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "_.".contains(letter);
        if key.chars().all(is_key) {
            let value = value.split(" #").next().unwrap_or(value).trim().to_owned();
            found.insert(joined(&section, key), (!commented).then_some(value));
        }
    }
    found
}

fn joined(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The settings on the page: the tables under each heading, and the blocks of TOML. With the default as written.
fn documented() -> BTreeMap<String, Option<String>> {
    let lines = lines(CONFIGURATION);
    let in_toml = lines.iter().filter(|line| line.block.as_deref() == Some("toml"));
    let mut found = settings(in_toml.map(|line| line.text.as_str()));
    let mut sections = Vec::new();
    let mut of_limit = false;
    for line in lines.iter().filter(|line| line.block.is_none()) {
        if let Some(heading) = line.text.strip_prefix("## ") {
            sections =
                code_spans(heading).iter().map(|name| name.trim_matches(['[', ']']).to_owned()).collect();
            of_limit = false;
        }
        of_limit |= line.text == "A limit:";
        let Some(row) = line.text.strip_prefix("| `") else { continue };
        // Under a heading of several sections the keys are whole paths; before the first one there are no settings.
        let [section] = sections.as_slice() else {
            if !sections.is_empty() {
                insert_row(&mut found, "", row);
            }
            continue;
        };
        let section = if of_limit { joined(section, "limits") } else { section.clone() };
        insert_row(&mut found, &section, row);
    }
    found
}

/// A row of a table, from behind its first backtick: the key, the default, what it means.
fn insert_row(found: &mut BTreeMap<String, Option<String>>, section: &str, row: &str) {
    let mut cells = row.split(" | ");
    let key = cells.next().unwrap_or_default().trim_end_matches('`');
    let default = cells.next().unwrap_or_default();
    let value = default.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
    found.insert(joined(section, key), value.map(str::to_owned));
}

/// Sections whose names the operator chooses.
fn is_named(path: &str) -> bool {
    ["plans.", "keys.", "accounts.", "upstreams.", "routes."].iter().any(|section| path.starts_with(section))
}

#[test]
fn the_page_of_settings_has_every_setting_with_its_default() {
    // A setting that is not on the page does not exist for its reader, and a wrong default is worse.
    let file = settings(tree::text("config/tollgate.toml").lines());
    assert!(file.len() > 20, "{file:#?}");
    let mut page = documented();
    page.retain(|path, _| !is_named(path));
    // The list of credentials as a whole, whose tables are on the page as an example.
    page.remove("identity.credentials");
    let paths =
        |settings: &BTreeMap<String, Option<String>>| settings.keys().cloned().collect::<BTreeSet<_>>();
    let (of_file, of_page) = (paths(&file), paths(&page));
    let missing: Vec<_> = of_file.difference(&of_page).collect();
    let invented: Vec<_> = of_page.difference(&of_file).collect();
    assert!(
        missing.is_empty() && invented.is_empty(),
        "not in {CONFIGURATION}: {missing:?}; not in config/tollgate.toml: {invented:?}"
    );
    for (path, default) in file {
        assert_eq!(page[&path], default, "the default of {path} on the page (left) and in the file");
    }
}

#[test]
fn the_page_of_settings_has_every_key_that_is_read() {
    // Plans, keys, upstreams and routes have no defaults file, so the reader of the configuration is the list.
    let source = tree::text("src/config/raw.rs");
    let verbs = ["require", "require_present", "get", "get_or", "list", "tables", "table", "has", "named"];
    let read: BTreeSet<String> = verbs
        .iter()
        .flat_map(|verb| source.split(&format!(".{verb}(\"")).skip(1).collect::<Vec<_>>())
        .chain(source.split("read_named(&mut root, \"").skip(1))
        .chain(source.split("read_named(&mut table, \"").skip(1))
        .chain(source.split("read_further_limits(&mut table, \"").skip(1))
        .filter_map(|rest| rest.split('"').next())
        .map(str::to_owned)
        .collect();
    assert!(read.len() > 30, "{read:?}");
    let page: BTreeSet<String> = documented()
        .keys()
        .flat_map(|path| path.split('.').map(str::to_owned).collect::<Vec<_>>())
        // What the operator names.
        .filter(|name| name != "NAME" && name != "ROUTE")
        .collect();
    assert_eq!(page, read, "names in {CONFIGURATION} (left) and in src/config/raw.rs");
}

#[test]
fn every_example_is_accepted() {
    // An example that does not start costs the first evening.
    let examples = [tree::files("config/examples", ".toml"), tree::files("examples", ".toml")].concat();
    assert!(examples.len() >= 5, "{examples:?}");
    for example in examples {
        // An example for the middleware has no upstreams; `check` is for gateways.
        let for_middleware = example.starts_with("examples/");
        let output = tollgate().args(["check", "-c"]).arg(tree::path(&example)).output().unwrap();
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        if for_middleware {
            assert!(said.lines().all(|line| line.contains("upstream")), "{example}: {said}");
        } else {
            assert!(output.status.success(), "{example}: {said}");
        }
    }
}

#[test]
fn every_fragment_of_toml_in_the_manual_is_right_as_far_as_it_goes() {
    // Fragments are what people copy. A part may lack its surroundings; what it has must be accepted.
    let lacking = [
        "is missing",
        "there is no route",
        "there is no plan",
        "there is no upstream",
        "names a file that cannot be read: No such file",
    ];
    // The reader's own hash stands here.
    let placeholders = ["\"sha256:...\"", "\"sha256:<64 hex digits>\""];
    let mut checked = 0;
    for document in documents() {
        for (number, fragment) in fragments(&document) {
            let hash = format!("\"sha256:{}\"", "0".repeat(64));
            let text =
                placeholders.iter().fold(fragment, |text, placeholder| text.replace(placeholder, &hash));
            let whole = if text.starts_with('{') { format!("[plans.p]\nlimits = [\n{text}]") } else { text };
            let Finished { code, output } = run("check", &whole, &[]);
            let right = |line: &str| code == 0 || lacking.iter().any(|words| line.contains(words));
            assert!(output.lines().all(right), "{document}:{number}: {output}\n{whole}");
            checked += 1;
        }
    }
    assert!(checked > 10, "only {checked} fragments were found");
}

/// The blocks of TOML in a document, with the line that each begins on.
fn fragments(document: &str) -> Vec<(usize, String)> {
    let mut fragments: Vec<(usize, String)> = Vec::new();
    let mut last = 0;
    for line in lines(document).iter().filter(|line| line.block.as_deref() == Some("toml")) {
        if line.number != last + 1 {
            fragments.push((line.number, String::new()));
        }
        last = line.number;
        if let Some((_, text)) = fragments.last_mut() {
            text.push_str(&line.text);
            text.push('\n');
        }
    }
    fragments
}

#[test]
fn every_link_leads_somewhere() {
    let mut followed = 0;
    for document in documents() {
        let directory = document.rsplit_once('/').map_or("", |(directory, _)| directory);
        for line in lines(&document).iter().filter(|line| line.block.is_none()) {
            for link in links(&line.text) {
                let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
                let wanted =
                    if target.is_empty() { document.clone() } else { joined_path(directory, target) };
                assert!(tree::path(&wanted).exists(), "{document}:{}: no {link}", line.number);
                let found = anchor.is_empty() || anchors(&wanted).contains(anchor);
                assert!(found, "{document}:{}: no heading for {link}", line.number);
                followed += 1;
            }
        }
    }
    assert!(followed > 20, "only {followed} links were found");
}

/// The relative links of a line: `[text](link)`.
fn links(line: &str) -> Vec<&str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|link| !link.starts_with("http"))
        .collect()
}

fn joined_path(directory: &str, target: &str) -> String {
    let mut parts: Vec<&str> = directory.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop();
            }
            name => parts.push(name),
        }
    }
    parts.join("/")
}

/// The headings of a document as links name them.
fn anchors(document: &str) -> BTreeSet<String> {
    lines(document)
        .iter()
        .filter(|line| line.block.is_none() && line.text.starts_with('#'))
        .map(|line| line.text.trim_start_matches('#').trim().to_lowercase().replace(' ', "-"))
        .map(|text| {
            text.chars().filter(|letter| letter.is_alphanumeric() || "-_".contains(*letter)).collect()
        })
        .collect()
}

#[test]
fn every_command_in_the_manual_exists() {
    let help = tollgate().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, commands) = help.split_once("Commands:\n").expect("the help lists commands");
    let known: BTreeSet<&str> = commands
        .lines()
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(known.contains("serve") && known.contains("demo"), "{known:?}");
    let mut named = BTreeSet::new();
    for document in documents() {
        for line in lines(&document) {
            let code = if line.block.is_some() { vec![line.text.as_str()] } else { code_spans(&line.text) };
            for command in code.into_iter().flat_map(commands_in) {
                assert!(known.contains(command), "{document}:{}: no `tollgate {command}`", line.number);
                named.insert(command.to_owned());
            }
        }
    }
    assert!(named.len() >= 5, "only {named:?} are in the manual");
}

/// The words behind the program's name in a command line, also when cargo runs it.
fn commands_in(code: &str) -> Vec<&str> {
    let behind = |start: &'static str| code.split(start).skip(1);
    behind("tollgate ")
        .chain(behind("cargo run -- "))
        .chain(behind("cargo run --release -- "))
        .filter_map(|rest| rest.split_whitespace().next())
        .filter(|word| word.chars().all(|letter| letter.is_ascii_lowercase()))
        .collect()
}

/// The README's promise: a command, and what it shows.
fn promise() -> (String, Vec<String>) {
    let lines = lines("README.md");
    let at = lines
        .iter()
        .position(|line| line.block.is_some() && line.text.starts_with("curl "))
        .expect("README.md has its curl");
    let shown = lines[at + 1..].iter().skip_while(|line| line.block.is_none());
    let shown = shown.take_while(|line| line.block.is_some()).map(|line| line.text.clone()).collect();
    (lines[at].text.clone(), shown)
}

#[test]
fn the_first_curl_ends_in_the_refusal_that_the_readme_shows() {
    // The only command that everybody runs.
    let (command, shown) = promise();
    let guide = tree::text("docs/guides/start-in-a-minute.md");
    assert!(guide.contains(&format!("\n{command}\n")), "the guide has another command than {command}");
    let gateway = Gateway::demo();
    let command = replaced(&command, "127.0.0.1:8080", &gateway.address().to_string());
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let printed: Vec<&str> = text.lines().collect();
    assert_eq!(printed.first(), Some(&"HTTP/1.1 429 Too Many Requests"), "{command}\n{text}");
    // The same field lines, and the same values where no clock and no counter is in them.
    let shown: Vec<&str> = shown.iter().map(String::as_str).collect();
    assert_eq!(names(&printed), names(&shown), "fields, printed and in README.md");
    for name in ["content-type", "cache-control", "retry-after", "ratelimit-policy", "content-length"] {
        assert_eq!(field(&printed, name), field(&shown, name), "{name}, printed and in README.md");
    }
    let problem = |line: &str| -> serde_json::Value {
        let mut problem: serde_json::Value = serde_json::from_str(line).unwrap();
        problem["instance"] = serde_json::Value::Null;
        problem
    };
    assert_eq!(problem(printed.last().unwrap()), problem(shown.last().unwrap()));
}

/// The names of all field lines. Their order has no meaning, and actix keeps none.
fn names<'a>(lines: &[&'a str]) -> BTreeSet<&'a str> {
    let head = lines.iter().take_while(|line| !line.is_empty());
    head.skip(1).filter_map(|line| line.split(':').next()).collect()
}

fn field<'a>(lines: &[&'a str], name: &str) -> Option<&'a str> {
    lines.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

#[track_caller]
fn replaced(text: &str, from: &str, to: &str) -> String {
    assert!(text.contains(from), "{from} is not in {text}");
    text.replace(from, to)
}
