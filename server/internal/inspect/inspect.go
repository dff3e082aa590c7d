// Package inspect reads the state of the database for operators.
package inspect

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// SomeRole stands for a role whose name is not known.
const SomeRole = "<role>"

// Grant returns the statement that lets a role call functions.
func Grant(role string, functions ...string) string {
	return "grant execute on function " + strings.Join(functions, ", ") + " to " + role + ";"
}

// A Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// CheckAlone returns an error if the database is one of several shards. A role without the grant is not checked: it needs the grant
// for nothing else.
func CheckAlone(ctx context.Context, conn *pgx.Conn) error {
	var may bool
	err := conn.QueryRow(ctx, `
		select coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('ratelimit_shard()')::oid, 'execute'), false)`).Scan(&may)
	if err != nil || !may {
		return err
	}
	return client.CheckAlone()(ctx, conn)
}

// A Bucket is a row of ratelimit_status. Times are nil for never.
type Bucket struct {
	Policy     string           `json:"policy"`
	Key        string           `json:"key"`
	Remaining  int64            `json:"remaining"`
	RetryAfter *jsonapi.Seconds `json:"retry_after"` // for one token
	ResetAfter *jsonapi.Seconds `json:"reset_after"`
	Capacity   int64            `json:"capacity"`
	Overridden bool             `json:"overridden"`
}

// Share is the part of the capacity that the bucket holds, below 0 in debt.
func (b Bucket) Share() float64 { return float64(b.Remaining) / float64(max(1, b.Capacity)) }

// Buckets returns the emptiest buckets, of one policy or of all, and of one key or of all. Without a key the database reads every
// bucket.
func Buckets(ctx context.Context, db Querier, policy, key *string, atMost int32) ([]Bucket, error) {
	rows, _ := db.Query(ctx, `
		select policy, key, remaining,
		       (extract(epoch from retry_after) * 1000000.0)::bigint,
		       (extract(epoch from reset_after) * 1000000.0)::bigint,
		       capacity, overridden
		  from ratelimit_status($1::text, $2::integer, $3::text)`, policy, atMost, key)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (b Bucket, err error) {
		var retryAfter, resetAfter *int64
		err = row.Scan(&b.Policy, &b.Key, &b.Remaining, &retryAfter, &resetAfter, &b.Capacity, &b.Overridden)
		b.RetryAfter, b.ResetAfter = seconds(retryAfter), seconds(resetAfter)
		return b, err
	})
}

// seconds converts microseconds. Null is never.
func seconds(micros *int64) *jsonapi.Seconds {
	if micros == nil {
		return nil
	}
	return new(jsonapi.Seconds(time.Duration(min(*micros, time.Duration(1<<63-1).Microseconds())) * time.Microsecond))
}

// A Finding is a row of ratelimit_doctor.
type Finding struct {
	Severity string `json:"severity"`
	Finding  string `json:"finding"`
	Remedy   string `json:"remedy"`
}

// Findings returns what is wrong.
func Findings(ctx context.Context, db Querier) ([]Finding, error) {
	rows, _ := db.Query(ctx, "select severity, finding, remedy from ratelimit_doctor()")
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Finding])
}

// Printable quotes a name that would change the text around it, by moving the cursor or the direction of text, and a name that
// begins or ends with a space.
func Printable(name string) string {
	quoted := fmt.Sprintf("%q", name)
	if quoted[1:len(quoted)-1] == name && strings.TrimSpace(name) == name {
		return name
	}
	return quoted
}

// Named reverses [Printable].
func Named(text string) string {
	if name, err := strconv.Unquote(text); err == nil && Printable(name) == text {
		return name
	}
	return text
}
