package envoy

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/policyfile"
)

// A DB is a *pgxpool.Pool or a *pgx.Conn.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	client.Querier
}

// Settle checks that the policies of all rules exist. It defines the policies that rules describe where they are missing or differ,
// if the role may. It is one transaction: an error changes nothing, and lists all that is wrong.
func (r *Rules) Settle(ctx context.Context, db DB) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		// Servers that start together take turns.
		if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgratelimit: rules of Envoy'))"); err != nil {
			return err
		}
		limiter := client.New(db).WithTx(tx)
		policies, err := limiter.Policies(ctx)
		if err != nil {
			return err
		}
		there := make(map[string]client.Policy, len(policies))
		for _, p := range policies {
			there[p.Name] = p
		}
		return r.settle(ctx, tx, limiter, there)
	})
	if err != nil {
		return fmt.Errorf("policies of the rules: %w", err)
	}
	return nil
}

func (r *Rules) settle(ctx context.Context, tx pgx.Tx, limiter *client.Limiter, there map[string]client.Policy) error {
	var may bool
	err := tx.QueryRow(ctx, "select coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regproc('ratelimit_define_policy')::oid, 'execute'), false)").Scan(&may)
	if err != nil {
		return err
	}
	var problems policyfile.Problems
	for _, described := range r.described {
		want := definition(described)
		has, isThere := there[want.Name]
		switch {
		case isThere && isAs(has, want):
			continue
		case may:
			if err = limiter.DefinePolicy(ctx, want); err != nil {
				return fmt.Errorf("%s: policy %q: %w", described.At, want.Name, err)
			}
		default:
			what := "is missing"
			if isThere {
				what = "has other numbers"
			}
			problems.Add(described.At, "policy %q %s, and this role may not define it. An administrator has to run: %s",
				want.Name, what, statement(want))
		}
		there[want.Name] = want
	}
	for _, rule := range r.list {
		if rule.Policy == "" {
			continue
		}
		has, isThere := there[rule.Policy]
		if !isThere {
			problems.Add(rule.At, "there is no policy %q: define it first, or give the rule unit and requests_per_unit", rule.Policy)
		}
		if has.Lease != 0 {
			problems.Add(rule.At, "policy %q lends slots, and has no tokens to take: write another policy", rule.Policy)
		}
		rule.shadow = has.Shadow == client.Yes
	}
	if problems != nil {
		return problems
	}
	return nil
}

// definition converts a policy that a rule describes.
func definition(described policyfile.Policy) client.Policy {
	p := client.Policy{Name: described.Name, Capacity: described.Capacity, Shadow: client.No}
	if described.Shadow {
		p.Shadow = client.Yes
	}
	if described.Period == "" {
		p.Refill, p.Every, p.Stepped = described.Refill, time.Duration(described.Every)*time.Microsecond, client.No
		return p
	}
	p.Period, _ = client.ParsePeriod(described.Period) // package policyfile has written it
	p.TimeZone = described.TimeZone
	p.Anchor, _ = time.Parse(time.DateOnly, described.Anchor) // likewise
	return p
}

// isAs reports whether a policy is as a rule describes it. Rules do not set durable and remember.
func isAs(has, want client.Policy) bool {
	want.Durable, want.Remember = has.Durable, has.Remember
	return has == want
}

// statement defines a policy in SQL.
func statement(p client.Policy) string {
	gains := fmt.Sprintf("refill => %d, every => '%d seconds', stepped => false", p.Refill, int64(p.Every/time.Second))
	if p.Period != (client.Period{}) {
		gains = fmt.Sprintf("period => '%v', time_zone => '%s', anchor => '%s'", p.Period, p.TimeZone, p.Anchor.Format(time.DateOnly))
	}
	return fmt.Sprintf("select ratelimit_define_policy('%s', capacity => %d, %s, shadow => %t);",
		strings.ReplaceAll(p.Name, "'", "''"), p.Capacity, gains, p.Shadow == client.Yes)
}
