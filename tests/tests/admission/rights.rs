//! Authorization matrix: every verb for every resource in every scope, checked on a real API server
//! against `rights.yaml`.

use super::TIMEOUT;
use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use kube::{Api, Client};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Instant;
use switchyard_tests::chart::render;
use switchyard_tests::{ControlPlane, Options};

/// Reviews sent concurrently.
const CONCURRENCY: usize = 32;
/// Fewer cells than this mean that the matrix is incomplete.
const MIN_CHECKS: usize = 400;
/// The scope of all namespaces at once. A right granted there holds in each namespace.
const ALL: &str = "all";
/// The scope of cluster-wide resources.
const CLUSTER: &str = "cluster";
/// The scope of non-resource URLs.
const PATHS: &str = "paths";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    verbs: Vec<String>,
    /// Namespaces by scope name.
    places: BTreeMap<String, String>,
    /// Resources by group, checked with each verb in each scope.
    namespaced: BTreeMap<String, Vec<String>>,
    /// Cluster-wide resources by group.
    cluster: BTreeMap<String, Vec<String>>,
    /// Additional cells with special resources, verbs or paths.
    besides: Vec<Rule>,
    who: Vec<Subject>,
}

/// A subject with all of its rights.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Subject {
    name: String,
    user: String,
    groups: Vec<String>,
    #[serde(default)]
    extra: BTreeMap<String, Vec<String>>,
    /// Also has the rights of this subject.
    like: Option<String>,
    #[serde(default)]
    may: Vec<Rule>,
}

/// A group of cells.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    #[serde(rename = "in")]
    places: Vec<String>,
    #[serde(default)]
    group: String,
    resources: Vec<String>,
    verbs: Vec<String>,
}

/// One cell: scope, group, resource, verb.
type Cell = [String; 4];

impl Rule {
    fn cells<'a>(&'a self, places: &'a [&'a str]) -> impl Iterator<Item = Cell> + 'a {
        places.iter().flat_map(move |place| {
            self.resources.iter().flat_map(move |resource| {
                self.verbs
                    .iter()
                    .map(move |verb| [(*place).to_string(), self.group.clone(), resource.clone(), verb.clone()])
            })
        })
    }
}

impl Table {
    fn read() -> Result<Table> {
        Ok(serde_saphyr::from_str(include_str!("rights.yaml"))?)
    }

    /// All cells of the matrix.
    fn all(&self) -> BTreeSet<Cell> {
        let product = |places: Vec<String>, resources: &BTreeMap<String, Vec<String>>| -> Vec<Rule> {
            let rule = |(group, resources): (&String, &Vec<String>)| Rule {
                places: places.clone(),
                group: group.clone(),
                resources: resources.clone(),
                verbs: self.verbs.clone(),
            };
            resources.iter().map(rule).collect()
        };
        let namespaced = product(self.places.keys().cloned().collect(), &self.namespaced);
        let cluster = product(vec![CLUSTER.into()], &self.cluster);
        let rules: Vec<&Rule> = namespaced.iter().chain(&cluster).chain(&self.besides).collect();
        rules.into_iter().flat_map(|rule| rule.cells(&words(&rule.places)).collect::<Vec<_>>()).collect()
    }

    /// Cells that the table allows for a subject.
    fn allowed(&self, subject: &Subject) -> Result<BTreeSet<Cell>> {
        let mut cells = BTreeSet::new();
        if let Some(name) = &subject.like {
            let other = self.who.iter().find(|other| other.name == *name);
            cells = self.allowed(other.with_context(|| format!("{}: like: no `{name}`", subject.name))?)?;
        }
        for rule in &subject.may {
            let mut places = words(&rule.places);
            if places.contains(&ALL) {
                places = words(self.places.keys());
            }
            cells.extend(rule.cells(&places));
        }
        Ok(cells)
    }

    /// The cell as a SubjectAccessReview.
    fn review(&self, subject: &Subject, [place, group, resource, verb]: &Cell) -> Result<SubjectAccessReview> {
        let mut spec = json!({"user": subject.user, "groups": subject.groups, "extra": subject.extra});
        if place == PATHS {
            spec["nonResourceAttributes"] = json!({"path": resource, "verb": verb});
        } else {
            let (resource, name) = resource.split_once(" named ").unwrap_or((resource, ""));
            let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
            let namespace = self.places.get(place).map_or("", String::as_str);
            spec["resourceAttributes"] = json!({
                "group": if group == "core" { "" } else { group }, "resource": resource, "subresource": subresource,
                "name": name, "namespace": namespace, "verb": verb,
            });
        }
        let object = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "metadata": {}, "spec": spec});
        Ok(serde_json::from_value(object)?)
    }

    /// Cells that the server allows.
    async fn ask(&self, client: &Client, subject: &Subject, cells: &BTreeSet<Cell>) -> Result<BTreeSet<Cell>> {
        let api = Api::<SubjectAccessReview>::all(client.clone());
        let ask = async |cell: &Cell| -> Result<Option<Cell>> {
            let answer = api.create(&Default::default(), &self.review(subject, cell)?).await?;
            Ok(answer.status.is_some_and(|status| status.allowed).then(|| cell.clone()))
        };
        let answers = stream::iter(cells).map(ask).buffer_unordered(CONCURRENCY);
        answers.try_filter_map(async |cell| Ok(cell)).try_collect().await
    }
}

fn words<'a>(of: impl IntoIterator<Item = &'a String>) -> Vec<&'a str> {
    of.into_iter().map(String::as_str).collect()
}

/// Groups cells into table rules: one line per common scope, group and verbs.
fn rules(cells: &BTreeSet<Cell>) -> Vec<String> {
    let mut verbs: BTreeMap<[&str; 3], Vec<&str>> = BTreeMap::new();
    for [place, group, resource, verb] in cells {
        let everywhere = [ALL.to_string(), group.clone(), resource.clone(), verb.clone()];
        if place == ALL || !cells.contains(&everywhere) {
            verbs.entry([place, group, resource]).or_default().push(verb);
        }
    }
    let mut resources: BTreeMap<(&str, &str, Vec<&str>), Vec<&str>> = BTreeMap::new();
    for ([place, group, resource], verbs) in verbs {
        resources.entry((place, group, verbs)).or_default().push(resource);
    }
    let line = |((place, group, verbs), resources): (&(&str, &str, Vec<&str>), &Vec<&str>)| {
        let (resources, verbs) = (resources.join(", "), verbs.join(", "));
        format!("- {{in: [{place}], group: {group}, resources: [{resources}], verbs: [{verbs}]}}")
    };
    resources.iter().map(line).collect()
}

/// Differences between the table and the server.
fn faults(name: &str, allowed: &BTreeSet<Cell>, actual: &BTreeSet<Cell>) -> Vec<String> {
    let differences =
        [("has rights that the table lacks", actual - allowed), ("lacks rights that the table has", allowed - actual)];
    let describe = |(words, cells): &(&str, BTreeSet<Cell>)| {
        (!cells.is_empty()).then(|| format!("{name} {words}:\n{}", rules(cells).join("\n")))
    };
    differences.iter().filter_map(describe).collect()
}

/// A control plane with the chart, and with all its roles bound to subjects.
pub(super) fn plane() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    let start = || -> Result<ControlPlane> {
        // The controller manager assembles aggregated roles.
        let plane = ControlPlane::start(&Options { controller_manager: true, ..Options::default() })?;
        plane.install_crds_now()?;
        plane.apply_chart(&[])?;
        let copies = render(&["--set", "kueue.multiKueue=true", "--show-only", "templates/roles.yaml"])?;
        for objects in [include_str!("members.yaml"), &copies] {
            let applied = plane.kubectl_with(&["apply", "-f", "-"], objects);
            ensure!(applied.code == Some(0), "{}", applied.stderr);
        }
        Ok(plane)
    };
    PLANE.get_or_init(|| start().unwrap_or_else(|error| panic!("{error:#}")))
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_have_exactly_the_rights_in_the_table() -> Result<()> {
    let table = Table::read()?;
    let client = plane().client().await?;
    let cells = table.all();
    let (begin, mut found) = (Instant::now(), Vec::new());
    for subject in &table.who {
        let allowed = table.allowed(subject)?;
        let unknown: BTreeSet<Cell> = &allowed - &cells;
        ensure!(unknown.is_empty(), "{}: in the table, but not checked: {:#?}", subject.name, rules(&unknown));
        // Roles are aggregated and take effect with a delay.
        let begin = Instant::now();
        loop {
            let faults = faults(&subject.name, &allowed, &table.ask(&client, subject, &cells).await?);
            if faults.is_empty() || begin.elapsed() > TIMEOUT {
                println!("{}: {} of {} allowed", subject.name, allowed.len(), cells.len());
                found.extend(faults);
                break;
            }
        }
    }
    let checks = cells.len() * table.who.len();
    println!("{checks} checks in {:.1} s", begin.elapsed().as_secs_f64());
    assert!(checks >= MIN_CHECKS, "{checks} checks");
    assert!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

#[test]
fn extra_and_missing_rights_are_detected() -> Result<()> {
    let table = Table::read()?;
    let controller = table.who.iter().find(|subject| subject.name == "controller").context("no controller")?;
    let allowed = table.allowed(controller)?;
    let cell = |place: &str, group: &str, resource: &str, verb: &str| -> Cell {
        [place, group, resource, verb].map(str::to_string)
    };
    let (secret, pod) = (cell("team", "core", "secrets", "get"), cell("team", "core", "pods", "create"));
    assert!(table.all().contains(&secret) && !allowed.contains(&secret) && allowed.contains(&pod));
    let mut actual = allowed.clone();
    actual.insert(secret);
    actual.remove(&pod);
    let reported = faults("controller", &allowed, &actual);
    let expected = [
        "controller has rights that the table lacks:\n- {in: [team], group: core, resources: [secrets], verbs: [get]}",
        "controller lacks rights that the table has:\n- {in: [team], group: core, resources: [pods], verbs: [create]}",
    ];
    assert_eq!(reported, expected);
    Ok(())
}

/// No two rules of a subject may cover the same cell, because people read the table.
#[test]
fn no_right_is_listed_twice() -> Result<()> {
    let table = Table::read()?;
    for subject in &table.who {
        let count: usize =
            subject.may.iter().map(|rule| rule.places.len() * rule.resources.len() * rule.verbs.len()).sum();
        let rules: Vec<Value> =
            subject.may.iter().map(|rule| json!([rule.places, rule.group, rule.resources])).collect();
        let cells: BTreeSet<Cell> =
            subject.may.iter().flat_map(|rule| rule.cells(&words(&rule.places)).collect::<Vec<_>>()).collect();
        assert_eq!(count, cells.len(), "{}: {rules:?}", subject.name);
    }
    Ok(())
}
