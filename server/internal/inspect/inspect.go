// Package inspect reads the state of the database for operators.
package inspect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// SomeRole stands for a role whose name is not known.
const SomeRole = "<role>"

// Grant returns the statement that lets a role call functions.
func Grant(role string, functions ...string) string {
	return "grant execute on function " + strings.Join(functions, ", ") + " to " + role + ";"
}

// Described adds DETAIL and a remedy to an error of the database.
func Described(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return err
	}
	hint := pgErr.Hint
	function := nameOf.FindString(pgErr.Message)
	database, isOfDatabase := strings.CutPrefix(pgErr.Message, "permission denied for database ")
	switch {
	case pgErr.Code == "42883" || pgErr.Code == "3F000" || pgErr.Code == "42P01": // no such function, schema or table
		hint = "Run pgratelimit install, or put the schema of the functions on search_path."
	case pgErr.Code == "42501" && isOfDatabase:
		hint = "Its owner can run: grant create on database " + pgx.Identifier{database}.Sanitize() + " to " + SomeRole + ";"
	case pgErr.Code == "42501" && function != "": // insufficient_privilege
		hint = "Its owner can run: " + Grant(SomeRole, function)
	case hint != "":
	case pgErr.Code == "42501":
		hint = "Grant it to the role, or connect as the owner of the functions."
	case pgErr.Code == "55P03": // lock_not_available
		hint = "Another session holds this: try again when it has ended."
	case pgErr.Code == "0A000" && pgErr.Routine == "call_bool_check_hook": // of a setting: a standby refuses the begin of a transaction that writes
		hint = "The database is read-only: connect to the primary."
	}
	more := strings.Join(slices.DeleteFunc([]string{pgErr.Detail, hint}, func(s string) bool { return s == "" }), " ")
	if more == "" {
		return err
	}
	return fmt.Errorf("%w. %s", err, more)
}

var nameOf = regexp.MustCompile(`ratelimit_\w+`)

// A Querier is a connection, a pool or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// CheckAlone refuses a database that is one of several shards. A role without the grant, which it needs for nothing else, is not checked.
func CheckAlone(ctx context.Context, conn *pgx.Conn) error {
	var may bool
	err := conn.QueryRow(ctx, `
		select coalesce(pg_catalog.has_function_privilege(pg_catalog.to_regprocedure('ratelimit_shard()')::oid, 'execute'), false)`).Scan(&may)
	if err != nil || !may {
		return err
	}
	return client.CheckAlone()(ctx, conn)
}

// A Row has the columns that the database returns, which may be newer than this program.
type Row []Column

// A Column has an interval as seconds, and an instant as a text.
type Column struct {
	Name  string
	Value any
}

// MarshalJSON writes all columns.
func (r Row) MarshalJSON() ([]byte, error) {
	object := make(map[string]any)
	for _, c := range r {
		object[c.Name] = c.Value
	}
	return json.Marshal(object)
}

// Rows returns what a statement selects.
func Rows(ctx context.Context, db Querier, sql string, args ...any) ([]Row, error) {
	rows, _ := db.Query(ctx, sql, args...)
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Row, err error) {
		values, err := row.Values()
		for i, value := range values {
			switch is := value.(type) {
			case pgtype.Interval:
				seconds := new(jsonapi.Seconds)
				value, err = seconds, seconds.ScanInterval(is)
			case time.Time:
				value = is.UTC().Format(time.RFC3339Nano)
			}
			r = append(r, Column{row.FieldDescriptions()[i].Name, value})
		}
		return r, err
	})
}

// A Bucket is a row of ratelimit_status. Times are nil for never.
type Bucket struct {
	Policy, Key            string
	Remaining, Capacity    int64
	RetryAfter, ResetAfter *jsonapi.Seconds // RetryAfter is for one token
	Overridden             bool
}

// Share is the part of the capacity that the bucket holds, below 0 in debt.
func (b Bucket) Share() float64 { return float64(b.Remaining) / float64(max(1, b.Capacity)) }

// Buckets returns the emptiest buckets, of one policy or of all, and of a key. Without one the database reads every bucket.
func Buckets(ctx context.Context, db Querier, policy, key *string, atMost int32) ([]Bucket, error) {
	rows, _ := db.Query(ctx, `select policy, key, remaining, capacity, retry_after, reset_after, overridden
		from ratelimit_status($1::text, $2::integer, $3::text)`, policy, atMost, key)
	return pgx.CollectRows(rows, pgx.RowToStructByPos[Bucket])
}

// A Finding is a row of ratelimit_doctor.
type Finding struct {
	Severity string `json:"severity"`
	Finding  string `json:"finding"`
	Remedy   string `json:"remedy"`
}

// Findings returns what is wrong. Each names the shard first, unless that is empty.
func Findings(ctx context.Context, db Querier, shard string) ([]Finding, error) {
	rows, _ := db.Query(ctx, "select severity, concat(nullif($1::text, '') || ': ', finding), remedy from ratelimit_doctor()", shard)
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
