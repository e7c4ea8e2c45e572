//! Routes: what they match, where they lead, and whether every plan can afford them.

use std::sync::Arc;

use super::Context;
use crate::config::mistakes::{Fault, Place};
use crate::config::raw::{Raw, RouteSection};
use crate::config::reader::Written;
use crate::config::sources::Purpose;
use crate::limit::Rule;
use crate::plan::{Methods, Pattern, Plan, Route};

/// A route that could be read, with where it is written.
struct Placed<'a> {
    section: &'a RouteSection,
    route: Route,
}

pub(super) fn resolve(
    raw: &Raw,
    plan_names: &[&str],
    upstream_names: &[&str],
    context: &Context<'_>,
) -> Vec<Route> {
    if raw.routes.is_empty() && !context.incomplete {
        let fault =
            Fault::new("there is no route, so nothing could be called").hint("add a [routes.NAME] table");
        context.notes.add(fault.at(&raw.place));
    }
    let mut placed: Vec<Placed<'_>> = Vec::new();
    for section in &raw.routes {
        check_references(section, plan_names, upstream_names, context);
        let Some(route) = route(section, context) else {
            continue;
        };
        if let Some(other) = placed.iter().find(|other| collide(&other.route, &route)) {
            let fault = Fault::new(format!(
                "routes.{} has the same path and method: only one of them could ever match",
                other.section.name
            ));
            context.notes.add(fault.at(&section.place));
        }
        placed.push(Placed { section, route });
    }
    placed.into_iter().map(|placed| placed.route).collect()
}

fn check_references(
    section: &RouteSection,
    plan_names: &[&str],
    upstream_names: &[&str],
    context: &Context<'_>,
) {
    if let Some(upstream) = &section.upstream {
        context.exists("upstream", upstream, upstream_names);
    }
    if !section.has_upstream && context.purpose == Purpose::Gateway {
        let fault = Fault::new("\"upstream\" is missing").meant("", upstream_names.iter().copied());
        context.notes.add(fault.at(&section.place));
    }
    let Some(plans) = &section.plans else { return };
    if plans.value.is_empty() {
        let fault = Fault::new("gives the route to no plan").hint("name a plan, or remove the route");
        context.note(fault, plans);
    }
    for plan in &plans.value {
        context.exists("plan", plan, plan_names);
    }
}

fn route(section: &RouteSection, context: &Context<'_>) -> Option<Route> {
    let pattern = pattern(section, context);
    let methods = methods(section, context);
    Some(Route {
        name: section.name.as_str().into(),
        pattern: pattern?,
        methods: methods?,
        cost: section.cost.as_ref()?.value,
        upstream: section.upstream.as_ref().map(|name| name.value.as_str().into()),
        plans: section.plans.as_ref().map(|plans| shared(&plans.value)),
        on_failure: section.on_failure.as_ref().map(|written| written.value),
    })
}

fn pattern(section: &RouteSection, context: &Context<'_>) -> Option<Pattern> {
    let path = section.path.as_ref()?;
    let parsed = Pattern::parse(&path.value);
    parsed.map_err(|error| context.note(Fault::new(error.to_string()), path)).ok()
}

/// The methods of a route; all of them when it names none.
fn methods(section: &RouteSection, context: &Context<'_>) -> Option<Methods> {
    let Some(written) = &section.methods else {
        return Some(Methods::all());
    };
    let names: Vec<String> = written.value.iter().map(|name| name.value.clone()).collect();
    let parsed = Methods::parse(&names);
    parsed.map_err(|error| context.note(Fault::new(error.to_string()), written)).ok()
}

fn shared(names: &[Written<String>]) -> Vec<Arc<str>> {
    names.iter().map(|name| name.value.as_str().into()).collect()
}

/// Whether one request could match both and neither is the more specific.
fn collide(one: &Route, other: &Route) -> bool {
    one.pattern.same_paths(&other.pattern) && one.methods.overlaps(other.methods)
}

/// A request that costs more than a limit can ever hold could never pass.
pub(super) fn check_costs(raw: &Raw, plans: &[Plan], routes: &[Route], context: &Context<'_>) {
    for route in routes {
        let section = raw.routes.iter().find(|section| *section.name == *route.name);
        let Some(cost) = section.and_then(|section| section.cost.as_ref()) else {
            continue;
        };
        for plan in plans.iter().filter(|plan| includes(route, plan)) {
            check_cost(route, plan, &cost.place, context);
        }
    }
}

fn check_cost(route: &Route, plan: &Plan, place: &Place, context: &Context<'_>) {
    let own = plan.routes.get(&route.name);
    let too_small = |rule: &&Rule| rule.algorithm.capacity() < route.cost;
    let Some(rule) = plan.limits.iter().chain(own.into_iter().flatten()).find(too_small) else {
        return;
    };
    let fault = Fault::new(format!(
        "costs {}, but limit \"{}\" of plan \"{}\" never holds more than {}",
        route.cost,
        rule.name,
        plan.name,
        rule.algorithm.capacity()
    ));
    let hint = "lower the cost, raise the limit, or leave the plan out with routes.X.plans";
    context.notes.add(fault.hint(hint).at(place));
}

fn includes(route: &Route, plan: &Plan) -> bool {
    route.plans.as_ref().is_none_or(|plans| plans.contains(&plan.name))
}
