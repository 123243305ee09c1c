//! CEL selectors of devices. A subset of the language is evaluated, in which the result is the same
//! as in Kubernetes (`k8s.io/dynamic-resource-allocation/cel`).

use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity, DeviceSelector};
use kube_cel::KubeCelExt;
use kube_cel::cel::common::ast::{CallExpr, Expr, LiteralValue, SelectExpr, operators};
use kube_cel::cel::objects::{Key, Map};
use kube_cel::cel::parser::{Expression, Parser};
use kube_cel::cel::{Context, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

const OPERATORS: [&str; 10] = [
    operators::CONDITIONAL,
    operators::LOGICAL_AND,
    operators::LOGICAL_OR,
    operators::LOGICAL_NOT,
    operators::EQUALS,
    operators::NOT_EQUALS,
    operators::LESS,
    operators::LESS_EQUALS,
    operators::GREATER,
    operators::GREATER_EQUALS,
];
const METHODS: [&str; 12] = [
    "orValue",
    "hasValue",
    "startsWith",
    "endsWith",
    "contains",
    "matches",
    "lowerAscii",
    "upperAscii",
    "isGreaterThan",
    "isLessThan",
    "compareTo",
    "value",
];

static FUNCTIONS: LazyLock<Context<'static>> = LazyLock::new(|| Context::default().with_all());

/// A selector of a DeviceClass or DeviceTaintRule.
#[derive(Debug, Clone, PartialEq)]
pub struct Selector {
    text: String,
    parsed: Result<Parsed, String>,
}

/// An expression in which variables replace `device.driver`, `device.attributes["DOMAIN"]` and
/// `device.capacity["DOMAIN"]`.
#[derive(Debug, Clone, PartialEq)]
struct Parsed {
    expression: Expression,
    /// The variables of the maps that it reads.
    maps: BTreeSet<String>,
}

/// Attributes and capacity of a device as JSON, because devices are many and selectors that read
/// them are rare.
#[derive(Debug)]
pub(super) struct Facts(Box<str>);

type Fields = (Option<BTreeMap<String, DeviceAttribute>>, Option<BTreeMap<String, DeviceCapacity>>);

impl Facts {
    pub fn of(device: &Device) -> Facts {
        let facts = serde_json::to_string(&(&device.attributes, &device.capacity));
        Facts(facts.unwrap_or_default().into())
    }

    /// The variables of an expression, by name; `None` if Kubernetes would evaluate no expression
    /// for this device.
    fn variables(&self, driver: &str, maps: &BTreeSet<String>) -> Option<BTreeMap<String, Value>> {
        let (attributes, capacity): Fields = serde_json::from_str(&self.0).ok()?;
        let mut values: BTreeMap<&str, BTreeMap<String, Value>> =
            maps.iter().map(|name| (name.as_str(), BTreeMap::new())).collect();
        let mut insert = |field: &str, name: &str, value: Value| {
            // A name without a domain is the driver's own.
            let (domain, id) = name.split_once('/').unwrap_or((driver, name));
            if let Some(map) = values.get_mut(variable(field, domain).as_str()) {
                map.insert(id.to_string(), value);
            }
        };
        for (name, attribute) in attributes.into_iter().flatten() {
            insert("attributes", &name, value_of(attribute)?);
        }
        for (name, capacity) in capacity.into_iter().flatten() {
            insert("capacity", &name, call("quantity", &capacity.value.0)?);
        }
        let maps = values.into_iter().map(|(name, map)| {
            let map = map.into_iter().map(|(id, value)| (Key::from(id), value)).collect();
            (name.to_string(), Value::Map(Map { map: Arc::new(map) }))
        });
        Some(maps.chain([("driver".to_string(), driver.into())]).collect())
    }
}

fn variable(field: &str, domain: &str) -> String {
    format!("{field}/{domain}")
}

/// `None` if it has no value of a known type.
fn value_of(attribute: DeviceAttribute) -> Option<Value> {
    match attribute {
        DeviceAttribute { int: Some(int), .. } => Some(int.into()),
        DeviceAttribute { bool: Some(bool), .. } => Some(bool.into()),
        DeviceAttribute { string: Some(string), .. } => Some(string.into()),
        // Kubernetes ignores build metadata when it compares versions; `cel` does not.
        DeviceAttribute { version, .. } => call("semver", version?.split('+').next().unwrap_or_default()),
    }
}

/// Calls a function with one string argument.
fn call(function: &str, argument: &str) -> Option<Value> {
    let mut scope = FUNCTIONS.new_inner_scope();
    scope.add_variable_from_value("argument", argument);
    let expression = Parser::new().parse(&format!("{function}(argument)")).ok()?;
    Value::resolve(&expression, &scope).ok()
}

impl Selector {
    /// The CEL selectors of a list.
    pub fn all(selectors: &[DeviceSelector]) -> Vec<Selector> {
        let expressions = selectors.iter().filter_map(|selector| selector.cel.as_ref());
        expressions.map(|cel| Selector::new(&cel.expression)).collect()
    }

    fn new(text: &str) -> Selector {
        let parse = || {
            let parser = Parser::new().enable_optional_syntax(true);
            let mut expression = parser.parse(text).map_err(|error| error.to_string())?;
            let mut maps = BTreeSet::new();
            value(&mut expression.expr, &mut maps)?;
            Ok(Parsed { expression, maps })
        };
        Selector { text: text.into(), parsed: parse() }
    }

    /// Why it is not evaluated: `EXPRESSION: REASON`.
    pub fn fault(&self) -> Option<String> {
        self.parsed.as_ref().err().map(|reason| format!("{}: {reason}", self.text))
    }

    /// Whether it selects a device of the driver; true if it is not evaluated.
    pub(super) fn matches(&self, driver: &str, facts: &Facts) -> bool {
        let Ok(Parsed { expression, maps }) = &self.parsed else { return true };
        let Some(variables) = facts.variables(driver, maps) else { return false };
        let mut scope = FUNCTIONS.new_inner_scope();
        for (name, value) in variables {
            scope.add_variable_from_value(name, value);
        }
        // Kubernetes does not select a device for which the expression fails.
        matches!(Value::resolve(expression, &scope), Ok(Value::Bool(true)))
    }
}

/// Checks an expression, and replaces the fields of `device` by variables.
///
/// # Errors
/// It uses a part of the language that `cel` evaluates differently than Kubernetes, or not at all.
fn value(expr: &mut Expr, maps: &mut BTreeSet<String>) -> Result<(), String> {
    match expr {
        Expr::Literal(LiteralValue::Boolean(_) | LiteralValue::Int(_) | LiteralValue::String(_)) => Ok(()),
        Expr::List(list) if list.optional_indices.is_empty() => {
            list.elements.iter_mut().try_for_each(|element| value(&mut element.expr, maps))
        }
        Expr::Select(select) => match &select.operand.expr {
            Expr::Ident(name) if name == "device" && select.field == "driver" && !select.test => {
                *expr = Expr::Ident("driver".into());
                Ok(())
            }
            _ => map(&mut select.operand.expr, maps),
        },
        Expr::Call(CallExpr { func_name, target: None, args }) => match (func_name.as_str(), args.as_mut_slice()) {
            (operators::INDEX | operators::OPT_INDEX | operators::OPT_SELECT, [operand, name]) => {
                map(&mut operand.expr, maps)?;
                value(&mut name.expr, maps)?;
                // `cel` fails for `a.?b` without `b`, but not for the equivalent `a[?"b"]`.
                if func_name == operators::OPT_SELECT {
                    *func_name = operators::OPT_INDEX.into();
                }
                Ok(())
            }
            (operators::IN, [element, container]) => {
                value(&mut element.expr, maps)?;
                map(&mut container.expr, maps).or_else(|_| value(&mut container.expr, maps))
            }
            // Build metadata: see `value_of`.
            ("semver", [only]) if string(&only.expr).is_some_and(|version| !version.contains('+')) => Ok(()),
            ("quantity", [only]) if string(&only.expr).is_some() => Ok(()),
            (name, arguments) if OPERATORS.contains(&name) => {
                arguments.iter_mut().try_for_each(|argument| value(&mut argument.expr, maps))
            }
            (name, _) => Err(format!("{name}() is not evaluated")),
        },
        Expr::Call(CallExpr { func_name, target: Some(target), args }) if METHODS.contains(&func_name.as_str()) => {
            value(&mut target.expr, maps)?;
            args.iter_mut().try_for_each(|argument| value(&mut argument.expr, maps))
        }
        Expr::Call(call) => Err(format!("{}() is not evaluated", call.func_name)),
        Expr::Comprehension(_) => Err("macros other than has() are not evaluated".into()),
        Expr::Ident(name) => Err(format!("{name} is not evaluated as a whole")),
        _ => Err("it has a literal that is not evaluated".into()),
    }
}

/// The same for `device.attributes["DOMAIN"]` and `device.capacity["DOMAIN"]`.
fn map(expr: &mut Expr, maps: &mut BTreeSet<String>) -> Result<(), String> {
    let refused = || "only device.driver, device.attributes[\"DOMAIN\"] and device.capacity[\"DOMAIN\"] are evaluated";
    let Expr::Call(CallExpr { func_name, target: None, args }) = &*expr else { return Err(refused().into()) };
    let ([operand, domain], operators::INDEX) = (args.as_slice(), func_name.as_str()) else {
        return Err(refused().into());
    };
    let Expr::Select(SelectExpr { operand, field, test: false }) = &operand.expr else { return Err(refused().into()) };
    let is_known = matches!(field.as_str(), "attributes" | "capacity");
    let (Expr::Ident(name), Some(domain), true) = (&operand.expr, string(&domain.expr), is_known) else {
        return Err(refused().into());
    };
    if name != "device" {
        return Err(refused().into());
    }
    let variable = variable(field, domain);
    maps.insert(variable.clone());
    *expr = Expr::Ident(variable);
    Ok(())
}

fn string(expr: &Expr) -> Option<&str> {
    match expr {
        Expr::Literal(LiteralValue::String(text)) => Some(text.inner()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
