package client

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// A Policy sets how large a bucket is and how fast it refills. An empty bucket must fill within 10,000
// years. To [Limiter.DefinePolicy], a zero field keeps the current value; a new policy needs Name, Capacity,
// Refill and Every.
type Policy struct {
	// Name has 1 to 512 bytes.
	Name string

	// Capacity is the number of tokens in a full bucket: up to 9,000,000,000,000. With [Zero] every cost above 0 is denied, and
	// [Decision.Never].
	Capacity int64

	// Refill is how many tokens a bucket gains in the time Every: up to 9,000,000,000,000. [Zero]
	// refills nothing, for any Every: a budget that lasts until [Limiter.Reset] or [Limiter.Refund] fills
	// it. A denial is then [Decision.Never].
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
	switch c {
	case Keep:
		return "keep"
	case Yes:
		return "yes"
	case No:
		return "no"
	}
	return fmt.Sprintf("Choice(%d)", int8(c))
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
	const verb = "define policy"
	if p.Every%time.Microsecond != 0 || p.Remember%time.Microsecond != 0 {
		return failed(verb, fmt.Errorf("%w: every %v and remember %v must be whole microseconds",
			ErrInvalidArgument, p.Every, p.Remember))
	}
	defer l.denials.forgetAll()
	return l.run(ctx, call{
		verb: verb,
		function: "ratelimit_define_policy($1::text, $2::bigint, $3::bigint, $4::text::interval, " +
			"$5::text::boolean, $6::text::boolean, $7::text::interval, $8::text::boolean)",
		args: []any{
			p.Name, number(p.Capacity), number(p.Refill), orNull(p.Every, interval(p.Every)),
			orNull(p.Stepped, p.Stepped.String()), // PostgreSQL reads yes and no, and refuses the rest
			orNull(p.Durable, p.Durable.String()),
			orNull(p.Remember, interval(p.Remember)),
			orNull(p.Shadow, p.Shadow.String()),
		},
	})
}

// DropPolicy removes a policy with its overrides, buckets and idempotency keys. It does not wait for acquires that
// are under way: the rows that they hold are left to clean-up, and no call counts them.
//
// It locks the policy and the rows that it removes until the transaction ends.
//
// Errors: [ErrUnknownPolicy], [ErrInvalidArgument].
func (l *limiter) DropPolicy(ctx context.Context, name string) error {
	defer l.denials.forgetAll()
	return l.run(ctx, call{
		verb:     "drop policy",
		function: "ratelimit_drop_policy($1::text)",
		args:     []any{name},
	})
}

// All policies are one row, because a Querier returns one row.
var policyColumns = `coalesce(pg_catalog.json_agg(pg_catalog.json_build_object(
		'name', policy, 'capacity', capacity, 'refill', refill, 'every', ` + microseconds("every") + `,
		'stepped', stepped, 'durable', durable, 'remember', ` + microseconds("remember") + `, 'shadow', shadow
		) order by policy collate "C"), '[]')::text`

// Policies lists the policies, ordered by name, with nothing left open. It writes and locks nothing.
func (l *limiter) Policies(ctx context.Context) ([]Policy, error) {
	const verb = "list policies"
	var text string
	err := l.query(ctx, call{verb: verb, columns: policyColumns, function: "ratelimit_policies()"}, &text)
	if err != nil {
		return nil, err
	}
	var rows []struct {
		Name                              string
		Capacity, Refill, Every, Remember int64
		Stepped, Durable, Shadow          bool
	}
	if err := json.Unmarshal([]byte(text), &rows); err != nil {
		return nil, failed(verb, err)
	}
	policies := make([]Policy, len(rows))
	for i, r := range rows {
		policies[i] = Policy{
			Name:     r.Name,
			Capacity: orZero(r.Capacity),
			Refill:   orZero(r.Refill),
			Every:    duration(r.Every),
			Stepped:  choice(r.Stepped),
			Durable:  choice(r.Durable),
			Remember: duration(r.Remember),
			Shadow:   choice(r.Shadow),
		}
	}
	return policies, nil
}

// interval writes whole microseconds for PostgreSQL, exactly: seconds would pass through a double there.
func interval(d time.Duration) string {
	return strconv.FormatInt(d.Microseconds(), 10) + " microseconds"
}

// number is the argument for a field that may be Zero, or null for a field left open.
func number(field int64) any {
	if field == Zero {
		return int64(0)
	}
	return orNull(field, field)
}

// orZero is the field for a number: number's other direction.
func orZero(n int64) int64 {
	if n == 0 {
		return Zero
	}
	return n
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
