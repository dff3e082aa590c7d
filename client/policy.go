package client

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// A Policy sets how large a bucket is, and how fast it refills or, for a quota, when it is full again. With a Lease it has slots
// in place of buckets. To [Limiter.DefinePolicy], a zero field keeps the current value; a new policy needs Name, Capacity, and
// Refill and Every, or a Period, or a Lease. None of the three kinds can become another: drop the policy and define it anew.
type Policy struct {
	// Name has 1 to 512 bytes.
	Name string

	// Capacity is the number of tokens in a full bucket: up to 9,000,000,000,000. With [Zero] every cost above 0 is denied, and
	// [Decision.Never].
	Capacity int64

	// Refill is how many tokens a bucket gains in the time Every: up to 9,000,000,000,000, and an empty bucket
	// must fill within 10,000 years. [Zero] refills nothing, whatever Every is, which is needed all the same: a budget that
	// lasts until [Limiter.Reset] or [Limiter.Refund] fills it. A denial is then [Decision.Never]. A quota has no Refill, no
	// Every and no Stepped.
	Refill int64

	// Every is the interval of Refill, in whole microseconds. SQL can define longer intervals than 292 years,
	// the longest [time.Duration]: [Limiter.Policies] cuts them.
	Every time.Duration

	// Stepped refills at the end of each interval only, and not continuously. Defaults to No for
	// a new policy.
	Stepped Choice

	// Durable keeps buckets and idempotency keys through a crash. Without it writes are cheaper,
	// and after a crash buckets are full and idempotency keys forgotten. It cannot be changed:
	// drop the policy and define it anew. Defaults to Yes for a new policy.
	Durable Choice

	// Remember is for how long a grant is remembered by its idempotency key, in whole
	// microseconds. Defaults to 24 hours for a new policy.
	Remember time.Duration

	// Shadow makes the policy watch only: a request that it would deny is allowed, takes nothing, and
	// is marked [Decision.Shadowed]. Buckets are charged as if it were enforced. It may change at any
	// time. Defaults to No for a new policy.
	Shadow Choice

	// Period makes the policy a quota: its buckets are full at each turn of a calendar, a Period after the
	// turn before, and gain nothing in between. What was used stays used when Capacity changes. Another Period,
	// TimeZone or Anchor fills no bucket by itself.
	Period Period

	// TimeZone is the time zone of the turns of a quota: UTC, or the name of a region with a slash, such as
	// Europe/Berlin. Defaults to UTC for a new quota.
	TimeZone string

	// Anchor is one turn of a quota, as a local time of TimeZone: see [Policy.Period]. The other turns are whole periods
	// from it: a month after 31 January is 28 or 29 February, and two months are 31 March. Its date and time of day
	// count, to the microsecond, and its [time.Location] does not. Years are 1 to 9999. Defaults to 1 January 2001, the
	// start of a week, a month, a quarter and a year, for a new quota.
	Anchor time.Time

	// Lease makes the policy lend slots: up to Capacity of a key at a time, 1 to 10,000, to holders that call
	// [Limiter.Hold]. A holder has its slots until it releases them, or until a Lease after its last renewal is over. It is
	// whole microseconds, 1 millisecond or more. Such a policy has no Refill, Every, Stepped, Remember, Period, TimeZone
	// and Anchor.
	Lease time.Duration

	// History keeps what the keys of a durable quota have used in its periods, for so long after the end of each: ratelimit_usage lists
	// it. A Period of [Zero] days keeps no more from then on. [Limiter.Policies] leaves it zero where nothing is kept.
	History Period
}

// A Period is the time between two turns of a quota: whole months or whole days, and not both, of 1 day to 1,000 years.
type Period struct{ Months, Days int }

// ParsePeriod reads a number of days, weeks, months or years, such as 7 days and 1 month.
//
// Errors: [ErrInvalidArgument].
func ParsePeriod(text string) (Period, error) {
	const maxMonths, maxDays = 12_000, 365_250
	if found := periodPattern.FindStringSubmatch(text); found != nil {
		n, err := strconv.Atoi(found[1])
		unit := periodUnits[found[2]]
		if p := (Period{n * unit.Months, n * unit.Days}); err == nil && 0 < n && n <= maxDays && p.Months <= maxMonths && p.Days <= maxDays {
			return p, nil
		}
	}
	return Period{}, fmt.Errorf("%w: period %q must be days, weeks, months or years, such as 7 days or 1 month, of 1 day to 1000 years", ErrInvalidArgument, text)
}

var (
	periodPattern = regexp.MustCompile(`^([0-9]+) (day|week|month|year)s?$`)
	periodUnits   = map[string]Period{"day": {Days: 1}, "week": {Days: 7}, "month": {Months: 1}, "year": {Months: 12}}
)

// String returns a text for ParsePeriod: 7 days, 1 month, 1 year. The zero Period is empty.
func (p Period) String() string {
	var parts []string
	add := func(n int, unit string) {
		if n != 1 {
			unit += "s"
		}
		parts = append(parts, strconv.Itoa(n)+" "+unit)
	}
	switch {
	case p.Months == 0:
	case p.Months%12 == 0:
		add(p.Months/12, "year")
	default:
		add(p.Months, "month")
	}
	if p.Days != 0 {
		add(p.Days, "day")
	}
	return strings.Join(parts, " ")
}

// Zero is the number 0 in a field whose own zero leaves the number open.
const Zero = -1

// A Choice is yes, no, or left open.
type Choice int8

// Keep, the zero Choice, leaves a policy as it is, and a new one at the default.
const (
	Keep Choice = iota
	Yes
	No
)

// String returns keep, yes or no.
func (c Choice) String() string {
	if c < Keep || c > No {
		return fmt.Sprintf("Choice(%d)", int8(c))
	}
	return [...]string{"keep", "yes", "no"}[c]
}

// DefinePolicy creates a policy, or changes the policy of that name. A change applies to the next acquire:
// levels stay, cut to the new capacity, and the time since a bucket was last written is credited at the
// new rate. Fields that are zero stay as they are. Running it again with the same Policy changes nothing.
// A program that defines a policy whenever it starts reverts the changes that an operator has made meanwhile: define
// it once, in a migration, or leave the operator's fields zero.
//
// It writes the policy and locks it until the transaction ends; acquires do not wait for this lock.
//
// Errors: [ErrInvalidArgument].
func (l *limiter) DefinePolicy(ctx context.Context, p Policy) error {
	if p.Every%time.Microsecond != 0 || p.Remember%time.Microsecond != 0 || p.Lease%time.Microsecond != 0 {
		return failed(verbDefine, fmt.Errorf("%w: every %v, remember %v and lease %v must be whole microseconds",
			ErrInvalidArgument, p.Every, p.Remember, p.Lease))
	}
	if err := checkAnchor(p.Anchor); err != nil {
		return failed(verbDefine, err)
	}
	defer l.prefetcher.withoutStocks(ctx, p.Name, "")()
	defer l.denialCache.forgetAll()
	return l.run(ctx, call{
		verb: verbDefine,
		function: "ratelimit_define_policy($1::text, $2::bigint, $3::bigint, $4::text::interval, " +
			"$5::text::boolean, $6::text::boolean, $7::text::interval, $8::text::boolean, " +
			"$9::text::interval, $10::text, $11::text::timestamp, $12::text::interval, $13::text::interval)",
		args: []any{
			p.Name, number(p.Capacity), number(p.Refill), orNull(p.Every, interval(p.Every)),
			orNull(p.Stepped, p.Stepped.String()), // PostgreSQL reads yes and no, and refuses the rest
			orNull(p.Durable, p.Durable.String()),
			orNull(p.Remember, interval(p.Remember)),
			orNull(p.Shadow, p.Shadow.String()),
			orNull(p.Period, p.Period.String()), orNull(p.TimeZone, p.TimeZone), localTime(p.Anchor), orNull(p.Lease, interval(p.Lease)),
			orNull(p.History, history(p.History)),
		},
	})
}

// DropPolicy removes a policy with its overrides, buckets, idempotency keys, holders and usage. It does not wait for acquires that
// are under way: the rows that they hold are left to clean-up, and no call counts them.
//
// It locks the policy and the rows that it removes until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) DropPolicy(ctx context.Context, name string) error {
	defer l.prefetcher.withoutStocks(ctx, name, "")()
	defer l.denialCache.forgetAll()
	return l.run(ctx, newCall("drop policy", "ratelimit_drop_policy($1::text)", name))
}

var policyColumns = `coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'name', policy, 'capacity', capacity, 'refill', refill, 'every', ` + microseconds("every") + `,
		'stepped', stepped, 'durable', durable, 'remember', ` + microseconds("remember") + `, 'shadow', shadow,
		'months', (extract(year from period) * 12.0 + extract(month from period))::integer, 'days', extract(day from period)::integer,
		'time_zone', time_zone, 'anchor', ` + microseconds("anchor") + `, 'lease', ` + microseconds("lease") + `,
		'history_months', (extract(year from history) * 12.0 + extract(month from history))::integer, 'history_days', extract(day from history)::integer
		) order by policy collate "C"), '[]')::text`

// A policyRow is a policy as policyColumns has it.
type policyRow struct {
	Name            string
	Capacity        *int64
	Refill, Every   *int64 // null for a quota and for slots
	Stepped         *bool  // likewise
	Durable, Shadow bool
	Remember        int64  // null, and so 0, for slots
	Months, Days    int    // null, and so 0, unless it is a quota
	TimeZone        string `json:"time_zone"`
	Anchor          *int64
	Lease           int64 // null, and so 0, unless it has slots
	HistoryMonths   int   `json:"history_months"` // null, and so 0, unless it keeps its usage
	HistoryDays     int   `json:"history_days"`
}

// Policies lists the policies, ordered by name, as they can be passed to DefinePolicy. Nothing is left open but the fields
// that a policy of its kind does not have. It writes and locks nothing.
func (l *limiter) Policies(ctx context.Context) ([]Policy, error) {
	rows, err := list[policyRow](ctx, l, call{verb: "list policies", columns: policyColumns, function: "ratelimit_policies()"})
	if err != nil {
		return nil, err
	}
	policies := make([]Policy, len(rows))
	for i, r := range rows {
		policies[i] = Policy{
			Name:     r.Name,
			Capacity: orZero(r.Capacity),
			Refill:   orZero(r.Refill),
			Durable:  choice(r.Durable),
			Remember: duration(r.Remember),
			Shadow:   choice(r.Shadow),
			Period:   Period{r.Months, r.Days},
			TimeZone: r.TimeZone,
			Anchor:   instant(r.Anchor),
			Lease:    duration(r.Lease),
			History:  Period{r.HistoryMonths, r.HistoryDays},
		}
		if r.Refill != nil {
			policies[i].Every, policies[i].Stepped = duration(*r.Every), choice(*r.Stepped)
		}
	}
	return policies, nil
}

// history writes that of a policy for PostgreSQL.
func history(p Period) string {
	if p == (Period{Days: Zero}) {
		return "0 days"
	}
	return p.String()
}

// interval writes whole microseconds for PostgreSQL, exactly: seconds would pass through a double there.
func interval(d time.Duration) string {
	return strconv.FormatInt(d.Microseconds(), 10) + " microseconds"
}

// checkAnchor refuses years that PostgreSQL reads as something else.
func checkAnchor(anchor time.Time) error {
	if year := anchor.Year(); year < 1 || 9999 < year {
		return fmt.Errorf("%w: anchor %v must be of the years 1 to 9999", ErrInvalidArgument, anchor)
	}
	return nil
}

// localTime writes the wall clock of a time for PostgreSQL. The zero time is null.
func localTime(t time.Time) any {
	return orNull(t, t.Truncate(time.Microsecond).Format("2006-01-02T15:04:05.999999"))
}

// instant reads microseconds since 1970. Null is the zero time.
func instant(microseconds *int64) time.Time {
	if microseconds == nil {
		return time.Time{}
	}
	return time.UnixMicro(*microseconds).UTC()
}

// number is the argument for a field that may be Zero, or null for a field left open.
func number(field int64) any {
	if field == Zero {
		return int64(0)
	}
	return orNull(field, field)
}

// orZero is the field for a number, or for null: number's other direction.
func orZero(n *int64) int64 {
	switch {
	case n == nil:
		return 0
	case *n == 0:
		return Zero
	}
	return *n
}

// orNull is the argument, or null for a field that is zero.
func orNull[F comparable](field F, argument any) any {
	var zero F
	if field == zero {
		return nil
	}
	return argument
}

func choice(b bool) Choice {
	if b {
		return Yes
	}
	return No
}

// An Override gives one bucket numbers of its own, in place of its policy's: a bigger plan, a smaller one, none
// at all. It has two parts: what stays, and what ends at ExpiresAt. Each number applies as what ends has it while it lasts, else as what
// stays has it, else as the policy has it at each call. One Override is one part; a zero field leaves the number to what follows.
type Override struct {
	// Policy and Key name the bucket.
	Policy, Key string

	// Capacity is the number of tokens in a full bucket: up to 9,000,000,000,000. [Zero] blocks: every cost
	// above 0 is denied until ExpiresAt; without that it is [Decision.Never].
	Capacity int64

	// Refill is how many tokens the bucket gains in the time Every, as in a [Policy]. [Zero] refills nothing. The two are one
	// number: to [Limiter.Override], one alone sets both, the other as it applies then. For a key of a quota both are zero.
	Refill int64
	Every  time.Duration

	// ExpiresAt is the end of the part that ends: from then on that is as good as absent. It is cut to the microsecond. The
	// zero time is the part that stays.
	ExpiresAt time.Time

	// TimeZone and Anchor are those of a [Policy], and for a key of a quota only: the zone of the customer, the day on which
	// the subscription began. They stay: with an ExpiresAt they are zero.
	TimeZone string
	Anchor   time.Time

	// Lease is that of a [Policy] with slots, and for a key of such a policy only: Capacity is then up to 10,000, and the other
	// numbers are zero. It applies to leases that are granted or renewed from now on.
	Lease time.Duration
}

// Override sets numbers of one part of a bucket's override; the others remain as they were. Without an ExpiresAt the numbers stay, and
// are taken out of what ends. With it they end then, as all that ends does. An ExpiresAt alone is another end for what ends. To go back to
// a number of the policy, remove the override and set the rest again.
//
// It applies to calls that begin after it has been committed. The bucket keeps its level, cut to the new capacity; in a quota,
// what was used stays used. An unused bucket is full at the new size. [Limiter.Reset] in the same transaction begins a plan
// with a full bucket.
//
// It writes the override. The policy's first override writes the policy, too, and locks it until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) Override(ctx context.Context, o Override) error {
	if o.Every%time.Microsecond != 0 || o.Lease%time.Microsecond != 0 {
		return failed(verbOverride, fmt.Errorf("%w: every %v and lease %v must be whole microseconds", ErrInvalidArgument, o.Every, o.Lease))
	}
	if err := checkAnchor(o.Anchor); err != nil {
		return failed(verbOverride, err)
	}
	defer l.prefetcher.withoutStocks(ctx, o.Policy, o.Key)()
	defer l.denialCache.forget(o.Policy, o.Key)
	return l.run(ctx, call{
		verb: verbOverride,
		function: "ratelimit_override($1::text, $2::text, $3::bigint, $4::bigint, $5::text::interval, $6::text::timestamptz, " +
			"$7::text, $8::text::timestamp, $9::text::interval)",
		args: []any{
			o.Policy, o.Key, number(o.Capacity), number(o.Refill), orNull(o.Every, interval(o.Every)),
			orNull(o.ExpiresAt, o.ExpiresAt.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)),
			orNull(o.TimeZone, o.TimeZone), localTime(o.Anchor), orNull(o.Lease, interval(o.Lease)),
		},
	})
}

// RemoveOverride gives a bucket its policy's numbers again, and reports whether it had numbers of its own, that stay or had not ended.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument], [ErrLocked].
func (l *limiter) RemoveOverride(ctx context.Context, policy, key string) (removed bool, err error) {
	defer l.prefetcher.withoutStocks(ctx, policy, key)()
	defer l.denialCache.forget(policy, key)
	c := newCall("remove override", "ratelimit_remove_override($1::text, $2::text)", policy, key)
	c.columns = "ratelimit_remove_override"
	err = l.query(ctx, c, &removed)
	return removed, err
}

var overrideColumns = `coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'policy', policy, 'key', key, 'capacity', capacity, 'refill', refill,
		'every', ` + microseconds("every") + `, 'expires_at', ` + microseconds("expires_at") + `,
		'time_zone', time_zone, 'anchor', ` + microseconds("anchor") + `, 'lease', ` + microseconds("lease") + `
		) order by policy collate "C", key collate "C", expires_at nulls first), '[]')::text`

// An overrideRow is a part of an override as overrideColumns has it. null is what follows: the zero value of a field.
type overrideRow struct {
	Policy, Key      string
	Capacity, Refill *int64
	Every            int64
	ExpiresAt        *int64 `json:"expires_at"`
	TimeZone         string `json:"time_zone"`
	Anchor           *int64
	Lease            int64
}

// newList reads the options of a list.
func newList(method string, opts []CallOption) settings {
	s := settings{maxRows: 1000}
	s.read(method, opts, "OfPolicy", "OfKey", "MaxRows")
	return s
}

// listKeyed lists rows about keys by a function that takes the options of newList.
func listKeyed[Row any](ctx context.Context, l *limiter, verb, columns, function string, s settings) ([]Row, error) {
	c := newCall(verb, function+"($1::text, $2::text, $3::bigint::integer)", s.policy, s.key, int64(s.maxRows))
	c.columns, c.err = columns, s.err
	return list[Row](ctx, l, c)
}

// Overrides lists what has not ended of overrides, ordered by policy and key, as it can be passed to Override: first the part that stays,
// then the part that ends. Options are [OfPolicy], [OfKey] and [MaxRows], which defaults to 1,000. It writes and locks nothing.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) Overrides(ctx context.Context, opts ...CallOption) ([]Override, error) {
	rows, err := listKeyed[overrideRow](ctx, l, "list overrides", overrideColumns, "ratelimit_overrides", newList("Overrides", opts))
	if err != nil {
		return nil, err
	}
	overrides := make([]Override, len(rows))
	for i, r := range rows {
		overrides[i] = Override{
			Policy:    r.Policy,
			Key:       r.Key,
			Capacity:  orZero(r.Capacity),
			Refill:    orZero(r.Refill),
			Every:     duration(r.Every),
			ExpiresAt: instant(r.ExpiresAt),
			TimeZone:  r.TimeZone,
			Anchor:    instant(r.Anchor),
			Lease:     duration(r.Lease),
		}
	}
	return overrides, nil
}
