package torture

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// A plantedBug is a change of a function of SQL: of the one place that a pattern matches, in which a space is any white space.
type plantedBug struct{ function, pattern, replacement string }

func (b plantedBug) plant(db *kit.TestDB) {
	db.Mutate(kit.Mutation{Pattern: b.pattern, Replacement: b.replacement}, b.function)
}

// pauseBefore has other sessions come to the same place, where they would seldom meet by chance.
func pauseBefore(function, pattern string) plantedBug {
	return plantedBug{function, pattern, "perform pg_sleep(0.002); $0"}
}

// A checker that has never failed proves nothing: each of these bugs must be found, by the script that its name begins with, if there is one.
func TestCalls_FindPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	for _, of := range []struct {
		bugs map[string]plantedBug
		manner
	}{{bugsOfInput, badInput}, {bugsOfTokens, tokens}, {bugsOfUsage, tokens}, {bugsOfSlots, slots}, {bugsOfHolders, slots}} {
		for name, bug := range of.bugs {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				c := newCaller(t, newTally())
				bug.plant(c.db)
				c.find(t, name, of.manner)
			})
		}
	}
}

// bugsOfInput are about arguments.
var bugsOfInput = map[string]plantedBug{
	"a key of 513 bytes":                           {"ratelimit.is_name", `octet_length\(value\) between 1 and 512`, `octet_length(value) between 1 and 513`},
	"bounds: a month in an interval":               {"ratelimit.check_span", `or extract\(month from value\) <> 0`, ``},
	"bounds: a cost checked too late":              {"ratelimit_peek", `acceptable\(key, cost\)`, `is_name(key)`},
	"patches of a quota: an internal error":        {"ratelimit.refuse", `errcode = '22023'`, `errcode = 'XX000'`},
	"an error that leaves something done":          {"ratelimit.decide_in_order", `if v_verdict\.refused is not null then`, `$0 update buckets set level = 0;`},
	"a clock that was far ahead: a token too many": {"ratelimit_refund", `least\(amount, v_policy.capacity\)`, `least(amount + 1, v_policy.capacity)`},
	"the floor: a policy that stays": {"ratelimit_drop_policy",
		`delete from policies as p where p.name = v_name returning p.id`, `update policies as p set name = p.name where p.name = v_name returning p.id`},
}

// bugsOfTokens are about buckets and quotas.
var bugsOfTokens = map[string]plantedBug{
	"ends before the longest wait: the first longest wait":                         {"ratelimit.waits_of_all", "exit when not v_over", "exit"},
	"several, and a clock that goes back: a refill that goes back with the clock":  {"ratelimit.refilled_until", `greatest\(refilled_at, now\)`, "now"},
	"several, and a clock that goes back: a clock that goes back takes of several": {"ratelimit_acquire_all", `(and b\.level >= microtokens\(v_element\.cost\)) and b\.refilled_at <= v_now`, "$1"},
	"the first of equals: the first of equals by the order of locks":               {"ratelimit_acquire_all", `(v_decision\.remaining / v_element\.cost; if )\(v_rank, v_element\.place\) < \(v_least, binding\)`, "${1}v_rank < v_least"},
	"lowered from the most: a retry_after a microsecond short":                     {"ratelimit.time_below", ` \+ round_up`, ""},
	"settlements of several: a bucket that is named twice is charged twice":        {"ratelimit.decide", `if same\[v_i\] = v_i then`, "if true then"},
	"a clock that was far ahead: a denial keeps what fits":                         {"ratelimit.decide", `if v_granted and fits\[v_i\]`, "if fits[v_i]"},
	"several, and a clock that goes back: a repeat in the call is charged":         {"ratelimit.decide", `and fits\[v_i\] and not replayed\[v_i\]`, "and fits[v_i]"},
	"bounds: a repeat with another cost is a repeat":                               {"ratelimit.decide", `if known\[v_i\]\.cost <> charges\[v_i\] then`, "if false then"},
	"answers: a shadow denies":                                                     {"ratelimit.decide", `\(fits\[v_i\] or numbers\[v_b\]\.shadow\)`, "fits[v_i]"},
	"an end of less: an answer is of after the batch":                              {"ratelimit.decide", `v_then_level\[v_i\] := levels\[v_b\];`, "v_then_level[v_i] := null;"},
	"an end: a wait that an override just does not outlast":                        {"ratelimit.wait_past_end", `v_wait_us < ratelimit\.time_until`, "v_wait_us <= ratelimit.time_until"},
	"an end of less: an override that ends denies for ever":                        {"ratelimit.wait_past_end", `ends_at is null or`, "true or"},
	"an end of less: a wait is over before the override is":                        {"ratelimit.wait_after_end", `greatest\(v_wait_us, ratelimit\.time_until\(ends_at, now\)\)`, "v_wait_us"},
	"an end of less: no row of a batch is full by the override":                    {"ratelimit.rows_of_buckets", `greatest\(\(u\.p\)\.capacity, \(u\.after\)\.capacity\)`, "(u.p).capacity"},
	"answers: a cost of 0 waits for debt to be paid":                               {"ratelimit.decide", `fits\[v_i\] := charges\[v_i\] = 0 or`, "fits[v_i] :="},
	"quotas: a turn is counted from the turn before": {"ratelimit.turning",
		`\(anchor \+ v_turn \* period\)([^;]*; v_turns\.turns_at := )\(anchor \+ \(v_turn \+ 1\) \* period\)`,
		"(anchor + (v_turn - 1) * period + period)${1}(anchor + v_turn * period + period)"},
	"clean-up under a zone: a turn comes by the clocks of UTC": {"ratelimit.turning",
		`(v_turns\.turned_at := [^;]*) at time zone time_zone; (v_turns\.turns_at := [^;]*) at time zone time_zone`,
		"$1 at time zone 'UTC'; $2 at time zone 'UTC'"},
	"patches of a quota: another zone fills": {"ratelimit_override",
		`insert into overrides as o`,
		`
			delete from buckets as b where b.policy_id = v_policy.id and b.key = v_key and ratelimit_override.time_zone is not null; $0`},
	"a calendar that is removed: an abbreviation is a zone": {"ratelimit.check_calendar", `time_zone !~ '/' or`, "false or"},
	"patches of a quota: an upgrade forgets what was used": {"ratelimit_define_policy",
		`exit when found;`, `
			if v_policy.id is not null then
			  update buckets as b set level = 0 where b.policy_id = v_policy.id and ratelimit_define_policy.capacity > v_policy.capacity; exit;
			end if; $0`},
	"quotas: a settlement gives back to the period after":            {"ratelimit_settle", `v_back := 0;`, "null;"},
	"clean-up removes a quota's row too early":                       {"ratelimit.quota_unused_after", `turns_of\(quota, now\)`, "turns_of(quota, now + interval '1 hour')"},
	"the floor: a charge that remembers what it did not take":        {"ratelimit_charge", `(insert into idempotency_keys [^;]*?)nullif\(v_held - v_level, microtokens\(v_cost\)\)`, "${1}null"},
	"lowered from the most: a partial grant of more than was taken":  {"ratelimit.partial_of", `then taken else 0`, `then taken + 1 else 0`},
	"pauses of a continuous policy: a pause that a shorter one ends": {"ratelimit_pause", `greatest\(v_until, (v_now [^;]*)\);`, "$1;"},
	"a clock that was far ahead: a pause leaves its tokens":          {"ratelimit_pause", `v_level := least\(v_level, 0\);`, ""},
	"pauses of a continuous policy: a pause that refills":            {"ratelimit_pause", `greatest\(v_refilled_at, v_until\)`, "refilled_until(v_refilled_at, v_now, v_policy.tick)"},
	"pauses of a stepped policy: a pause to the last interval":       {"ratelimit_pause", `greatest\(v_refilled_at, v_until\)`, "refilled_until(v_refilled_at, v_until, v_policy.tick)"},
	"pauses of a continuous policy: a pause by numbers that end":     {"ratelimit_pause", `\.ends_at <= v_until`, ".ends_at < v_now"},
	"pauses of a continuous policy: a refund that ends a pause":      {"ratelimit_refund", `when b\.paused_until > v_now`, "when false"},
	"pauses of a continuous policy: a settlement that ends a pause":  {"ratelimit_settle", `v_paused_until > v_now`, "false"},
	"a clock that was far ahead: a wait is the difference of local times": {"ratelimit.wait_for_turn",
		`ratelimit\.time_until\(turns\.turns_at, now\)`,
		"ratelimit.microseconds((turns.turns_at at time zone quota.time_zone) - (now at time zone quota.time_zone))::bigint"},
	"patches of a quota: a patch that resets what it does not set": {"ratelimit_override", `coalesce\(ratelimit_override\.capacity, v_new\.capacity\)`, "ratelimit_override.capacity"},
	"a calendar that is removed: an override that keeps the policy's capacity": {"ratelimit_override",
		`coalesce\(ratelimit_override\.capacity, v_new\.capacity\)`, "coalesce(ratelimit_override.capacity, v_new.capacity, v_policy.capacity)"},
	"patches of a quota: what is set to stay still ends":                         {"ratelimit_override", `case when ratelimit_override\.capacity is null then v_new\.ending_capacity end`, "v_new.ending_capacity"},
	"patches of buckets: an interval of the policy's in place of the override's": {"ratelimit_override", `(v_every := [^;]*?)v_numbers\.every`, "${1}v_policy.every"},
	"patches of buckets: what has ended counts in the next patch":                {"ratelimit_override", `if v_new\.expires_at <= v_now then`, "if false then"},
	"patches of a quota: the policy counts where what stays should":              {"ratelimit.numbers_by", `ratelimit\.with_override\(policy, override, 'infinity'\)`, "policy"},
	"slots: what ends counts at its end":                                         {"ratelimit.with_override", `at < override\.expires_at`, "at <= override.expires_at"},
	"pauses of a stepped policy: a stepped policy, and a key that is not":        {"ratelimit.with_override", `if policy\.stepped then`, "if false then"},
	"patches of buckets: clean-up removes what stays":                            {"ratelimit.cleanup_batch", `(?s)where not d\.stays(.*?)where d\.stays`, "${1}where false"},
	"clean-up forgets what stays of an override":                                 {"ratelimit.cleanup_buckets", `case when o\.stays [^;]*?(case when o\.expires_at)`, "$1"},
	"a clock that was far ahead: a wait by far apart numbers does not saturate":  {"ratelimit.long_wait", `ratelimit\.longest_wait\(\)`, "1e30"},
	"a clock that was far ahead: the wait for a far turn does not saturate":      {"ratelimit.time_until", `least\((.*), ratelimit\.longest_wait\(\)\)`, "$1"},
	"clean-up under a zone: a bucket with a zone of its own is never removed": {"ratelimit.cleanup_buckets",
		`case when o\.stays or p`, "case when o.stays and o.capacity is null then 86400000000 when o.stays or p"},
}

// bugsOfUsage are about closed periods, and settlements of several.
var bugsOfUsage = map[string]plantedBug{
	"a calendar that is removed: a period is closed twice": {"ratelimit.close_period", `set level = 0, refilled_at = v_now`, "set level = b.level, refilled_at = v_now"},
	"usage: a batch closes a period twice":                 {"ratelimit.take_quotas_from_buckets", `case when u\.is_over then 0 else b\.level end - u\.wanted`, "b.level - u.wanted"},
	"usage: a denial closes a period": {"ratelimit.take_quota_of_buckets", `v_taken := least\(at_most, whole_tokens\(v_held\)\);`,
		`$0 if policy.history is not null then perform close_period(policy.id, v_key, v_now); end if;`},
	"usage: a replay is used": {"ratelimit.take_quota_of_buckets", `(if v_first\.expires_at > v_now then )(return replayed_partial\([^;]*; end if; end if; loop)`,
		`$1 update buckets as b set level = b.level - microtokens(1) where b.policy_id = policy.id and b.key = v_key; $2`},
	"usage: a settlement closes nothing":                                           {"ratelimit_settle", `if v_refilled_at < v_turns\.turned_at then perform close_period`, "if false then perform close_period"},
	"usage: a reset loses a period that is over":                                   {"ratelimit_reset", `if v_history is not null then`, "if false then"},
	"clean-up under a zone: a row is removed before it was kept":                   {"ratelimit.cleanup_buckets", `where r\.level < 0 and`, "where false and"},
	"usage: a period is cut where its calendar changed":                            {"ratelimit.period_began", `coalesce\(counts_from, turns\.turned_at\)`, "turns.turned_at"},
	"periods that would overlap: periods overlap":                                  {"ratelimit.period_began", `greatest\((coalesce\(counts_from, turns\.turned_at\)), last\.ended\)`, "$1"},
	"a calendar that is removed: another calendar closes nothing":                  {"ratelimit.change_calendar", `perform close_period\([^;]*;`, ""},
	"usage: a patch of a calendar closes nothing":                                  {"ratelimit_override", `perform change_calendar\([^;]*;`, "null;"},
	"a calendar that is removed: a calendar that is removed closes nothing":        {"ratelimit_remove_override", `perform change_calendar\([^;]*;`, "null;"},
	"usage: a history that was ended keeps":                                        {"ratelimit.close_period", `v_quota\.history = interval '0'`, "false"},
	"settlements of several: a settlement of several stops at a replay":            {"ratelimit_settle_all", `or v_decision\.replayed;`, "$0 exit when v_decision.replayed;"},
	"settlements of several: a bucket that is named twice is settled at one cost":  {"ratelimit_settle_all", `sum\(u\.cost\) over same as sum`, "u.cost::numeric as sum"},
	"settlements of several: a settlement of several leaves out what has no grant": {"ratelimit_settle_all", `case when not v_policy\.shadow then v_n end`, "null::integer"},
	"settlements of several: a settlement of several keeps what it moved before it failed": {"ratelimit_settle_all",
		`(?s)if v_missing <> '\{\}' then(.*?)(v_decision := settle\([^;]*;)`,
		"if v_missing = v_order then$1 begin $2 exception when sqlstate 'RL002' or sqlstate 'RL003' then v_decision := null; end;"},
}

// bugsOfSlots are about the leases of one key.
var bugsOfSlots = map[string]plantedBug{
	"a release after the end: a microsecond short":                        {"ratelimit.look_at_slots", `time_until\(v_first, v_now\)`, "greatest(time_until(v_first, v_now) - 1, 1)"},
	"a release after the end: a microsecond long":                         {"ratelimit.look_at_slots", `time_until\(v_first, v_now\)`, "time_until(v_first, v_now) + 1"},
	"waits for slots: when the last lease ends":                           {"ratelimit.look_at_slots", `min\(u\.ends_at\) filter`, "max(u.ends_at) filter"},
	"waits for slots: the capacity of the override only":                  {"ratelimit.look_at_slots", `u\.ends_at >= v_ends_at`, "false"},
	"slots: an end to for ever":                                           {"ratelimit.look_at_slots", `v_first := least\(v_first,`, "v_first := least(coalesce(v_first, v_now + interval '1 day'),"},
	"bounds: a cost of 0 slots":                                           {"ratelimit_hold", `cost >= 1`, `cost >= 0`},
	"a renewal of a lease that has ended":                                 {"ratelimit_renew", `and l\.ends_at > v_now; elsif`, `; elsif`},
	"slots: a release of all holders":                                     {"ratelimit_release", `and l\.holder = v_holder collate "C" and l\.ends_at`, `and l.ends_at`},
	"sums of slots: a shorter lease ends behind the sum":                  {"ratelimit_hold", `least\(s\.counted_until, v_ends_at\)`, "s.counted_until"},
	"sums of slots: a renewal that is shorter ends behind the sum":        {"ratelimit_renew", `least\(s\.counted_until, v_earlier\)`, "s.counted_until"},
	"a release after the end: a release of an ended lease lowers the sum": {"ratelimit_release", `if v_released = v_cost then return true; end if;`, "return v_released is not null;"},
	"slots: a release keeps the sum":                                      {"ratelimit_release", `held = s\.held - v_cost,`, ""},
	"sums of slots: a grant keeps the leases that have ended":             {"ratelimit_hold", `delete from leases as l where l\.policy_id = v_policy\.id and l\.key = v_key and`, "$0 false and"},
	"waits for slots: a wait by the override that ends":                   {"ratelimit.look_at_slots", `u\.ends_at >= v_ends_at`, "u.ends_at > v_ends_at"},
	"slots: a renewal is denied when capacity was lowered":                {"ratelimit_hold", `exit when v_own_cost = v_cost or`, "exit when"},
}

// bugsOfHolders are found by the order of calls, too.
var bugsOfHolders = map[string]plantedBug{
	"sums of slots: a holder holds at the end of its lease":    {"ratelimit_hold", `and l\.ends_at > v_now;`, "and l.ends_at >= v_now;"},
	"a renewal at the end of a lease":                          {"ratelimit_renew", `and l\.ends_at > v_now; elsif`, "and l.ends_at >= v_now; elsif"},
	"a release after the end: a release at the end of a lease": {"ratelimit_release", `and l\.ends_at > v_now returning`, "and l.ends_at >= v_now returning"},
	"slots: a release of somebody else's lease":                {"ratelimit_release", `(delete from leases as l where [^;]*?) and l\.holder = v_holder collate "C"`, "$1"},
	"a renewal of what is over":                                {"ratelimit_renew", `and l\.holder = v_holder and l\.ends_at > v_now`, "and l.holder = v_holder"},
	"slots: a renewal that acquires": {"ratelimit_renew", `if found then if`, `
		insert into slots values (v_policy.id, 0, '-infinity', v_now, v_key) on conflict on constraint slots_pkey do nothing;
		insert into leases values (v_policy.id, v_now + interval '1 s', 1, v_key, v_holder) on conflict on constraint leases_pkey do nothing;
		if true then if`},
}

// bugsOfHistories show in the order of calls alone. Each may take several changes.
var bugsOfHistories = map[string][]plantedBug{
	"a grant by an unlocked read": {
		{"ratelimit_acquire",
			`(update buckets as b set level = [^;]*? and )credit_by_rate\(date_part\('epoch', v_now - b\.refilled_at(\) \* 1000000, [^)]*\) >= microtokens\(v_cost\) -) b\.level`,
			`$1 (select credit_by_rate(date_part('epoch', v_now - o.refilled_at$2 o.level from buckets as o where o.policy_id = v_policy.id and o.key = v_key collate "C")`},
	},
	"a batch that decides by an unlocked read": {
		{"ratelimit.lock_buckets", `(from buckets as b [^;]* limit 1 )for update`, "$1"},
		pauseBefore("ratelimit.write_buckets", `update buckets as b set level = u.level`),
	},
	"a clock that goes back": {{"ratelimit_acquire", `and b\.refilled_at <= v_now and credit`, "and credit"}},
	"a concurrent repeat is charged again": {
		{"ratelimit_acquire", `(update buckets as b set level = b.level) \+ microtokens\(v_cost\)`, "$1"},
		pauseBefore("ratelimit_acquire", `insert into idempotency_keys \(`),
	},
	"a denial by the clock before the wait": {{"ratelimit_acquire", `v_now := clock\(\);( select [^;]* from buckets as b)`, "$1"}},
	"a denial of a batch by the clock before the wait": {
		{"ratelimit.decide_left", `costs, places, clock\(\)`, "costs, places, statement_timestamp()"},
	},
	"a bucket that is named twice is charged twice": {{"ratelimit.decide", `if same\[v_i\] = v_i then`, "if true then"}},
	"a denial keeps the first charge":               {{"ratelimit.decide", `if v_granted and fits\[v_i\]`, "if (v_granted or v_i = v_start) and fits[v_i]"}},
	"a replay is charged": {
		{"ratelimit.decide", `and fits\[v_i\] and not replayed\[v_i\]`, "and fits[v_i]"},
		{"ratelimit.decide", `kept\[v_i\] := (idem.*?);`, "kept[v_i] := $1 and not replayed[v_i];"},
	},
	"an override is read before the lock, and not again": {
		{"ratelimit.decide_in_order",
			`v_numbers := v_look\.numbers;`, "v_numbers := case when v_round = 1 then v_look.numbers else v_numbers end;"},
	},
	"buckets are locked in an order of the caller's": {
		{"ratelimit.number_buckets", `dense_rank\(\) over \(order by e.policy, e.key\)`, "dense_rank() over (order by e.policy, md5(e.key || pg_backend_pid()))"},
		{"ratelimit.number_buckets", `array_agg\(b.key order by b.policy, b.key\)`, "array_agg(b.key order by b.policy, md5(b.key || pg_backend_pid()))"},
		pauseBefore("ratelimit.lock_buckets", `perform from buckets as b`),
	},
	"a pause by an unlocked read": {
		{"ratelimit_pause", ` for update;`, ";"},
		pauseBefore("ratelimit_pause", `update buckets as b set level = v_level`),
	},
	"a settlement counts twice": {{"ratelimit_settle", `(update idempotency_keys as k set settled = [^;]*?)and k.settled is null`, "$1"}, pauseBefore("ratelimit_settle", `update idempotency_keys as k set settled =`)},
	"a charge counts twice": {
		{"ratelimit_charge", `(insert into idempotency_keys [^;]*?) where k.expires_at <= v_now; exit when found;`, "$1; exit when found;"},
		pauseBefore("ratelimit_charge", `insert into idempotency_keys as k`),
	},
	"a settlement moves the level without its mark": {
		{"ratelimit_settle", `(update idempotency_keys as k set settled = [^;]*;) exit when found;`, "$1 exit;"},
		pauseBefore("ratelimit_settle", `update idempotency_keys as k set settled =`),
	},
	"a settlement above full":         {{"ratelimit.moved_level", `least\(full_level, (level::numeric \+ change)\)`, "$1"}},
	"a settlement that stops at zero": {{"ratelimit.moved_level", `least\(level, floor_level\)`, "least(level, 0)"}},
	"a charge by an unlocked read": {
		{"ratelimit_charge", `(from buckets as b where b.policy_id = v_policy.id and b.key = v_key) for update`, "$1"},
	},
	"as many tokens as a stale row had": {
		{"ratelimit_acquire_up_to",
			`(update buckets as b set level = v_level[^;]*?)and b.level = v_seen_level and b.refilled_at = v_seen_at`, "$1"},
		pauseBefore("ratelimit_acquire_up_to", `update buckets as b set level = v_level`),
	},
	"a reservation by a stale row": {
		{"ratelimit_reserve", `(update buckets as b set level = v_level[^;]*?)and b.level = v_seen_level and b.refilled_at = v_seen_at`, "$1"},
		pauseBefore("ratelimit_reserve", `update buckets as b set level = v_level`),
	},
	"clean-up ignores overrides": {
		{"ratelimit.cleanup_buckets", `case when o\.stays [^;]*?(case when b\.paused_until)`, "$1"},
	},
}

// bugsOfSlotHistories are those about slots.
var bugsOfSlotHistories = map[string]plantedBug{
	"a release of what is live still":      {"ratelimit_hold", `and l\.ends_at <= v_now`, "and l.ends_at <= v_now + interval '20 ms'"},
	"a lease from before the wait":         {"ratelimit_hold", `v_seen_at := v_now; v_now := clock\(\);`, "v_seen_at := v_now; perform clock();"},
	"a renewed lease from before the wait": {"ratelimit_renew", `v_now := clock\(\);( if v_override\.expires_at <= v_now)`, "perform clock();$1"},
	// The sum of a grant is not among them: a lease that has ended at the last reading of the clock has it count again.
	"a lease counts at its end":  {"ratelimit.look_at_slots", `l\.ends_at > v_now\) as u`, "l.ends_at >= v_now) as u"},
	"a sum from before the lock": {"ratelimit_hold", `exit when v_own_cost = v_cost`, "v_held := v_look.held; $0"},
	"a lock that is left out":    {"ratelimit_hold", `(perform s\.held from slots as s [^;]*?) for update;`, "$1;"},
}
