package kit

import (
	"context"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// RowsRead runs SQL and counts the rows of the package's tables that it read.
func (s *Session) RowsRead(sql string) (rows int64) {
	count := func() (rows int64) {
		require.NoError(s.Db.T, s.QueryRow(context.Background(), `
			select sum(seq_tup_read + idx_tup_fetch)::bigint from pg_stat_xact_user_tables where schemaname = 'ratelimit'`).Scan(&rows))
		return rows
	}
	s.Execute("begin")
	before := count()
	s.Execute(sql)
	rows = count() - before
	s.Execute("commit")
	return rows
}

// A plan is what the server made of a statement of a function.
type plan struct{ Statement, Nodes string }

var planNode = regexp.MustCompile(`(?m)^ *(?:->  )?(.*)  \(cost=`)

// A planner is a session that returns the plans of the statements of functions.
type planner struct {
	T     testing.TB
	Conn  *pgx.Conn
	plans []plan
}

func (db *TestDB) Planner() *planner {
	p := &planner{T: db.T}
	config := NoError(pgx.ParseConfig(db.URL))(db.T)
	config.OnNotice = func(_ *pgconn.PgConn, notice *pgconn.Notice) {
		if _, text, found := strings.Cut(notice.Message, "Query Text: "); found {
			var nodes strings.Builder
			for _, node := range planNode.FindAllStringSubmatch(text, -1) {
				nodes.WriteString(node[1] + "; ")
			}
			text, _, _ = strings.Cut(text[:planNode.FindStringIndex(text)[0]], "\nQuery Parameters: ") // since PostgreSQL 16
			p.plans = append(p.plans, plan{strings.Join(strings.Fields(text), " "), nodes.String()})
		}
	}
	p.Conn = NoError(pgx.ConnectConfig(context.Background(), config))(db.T)
	db.T.Cleanup(func() { _ = p.Conn.Close(context.Background()) })
	Execute(db.T, p.Conn, "load 'auto_explain'")
	return p
}

// PlansOf runs calls that are rolled back, for a durable and an ephemeral policy, and returns the plans of all statements.
func (p *planner) PlansOf(settings string, calls []string) []plan {
	Execute(p.T, p.Conn, "reset all; discard plans; "+settings+`; set search_path = ratelimit, public;
		set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
		set client_min_messages = log; set log_min_messages = panic`, pgx.QueryExecModeSimpleProtocol)
	p.plans = nil
	for _, policy := range []string{"p", "e"} {
		all := strings.ReplaceAll(strings.Join(calls, "; "), "POLICY", policy)
		Execute(p.T, p.Conn, "begin; "+all+"; rollback", pgx.QueryExecModeSimpleProtocol)
	}
	return p.plans
}
