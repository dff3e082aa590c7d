package spend

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A postgrestAnswer is those two documents.
type postgrestAnswer struct {
	Message struct {
		Code, Message *string // obligatory
		Details, Hint *string
	}
	Detail struct {
		Status  *int `json:"status"` // obligatory
		Headers map[string]string
	}
}

// postgrest reads the answer as PostgREST does: anything that is missing, or of another type, would make it 500.
func postgrest(t *testing.T, err error) postgrestAnswer {
	e := kit.PgError(err)
	require.NotNil(t, e, "%v", err)
	require.Equal(t, "PGRST", e.Code, "%v", err)
	require.Empty(t, e.Hint)
	var a postgrestAnswer
	for text, into := range map[string]any{e.Message: &a.Message, e.Detail: &a.Detail} {
		decoder := json.NewDecoder(strings.NewReader(text))
		decoder.DisallowUnknownFields()
		require.NoError(t, decoder.Decode(into), text)
		require.False(t, decoder.More(), text)
	}
	require.NotNil(t, a.Message.Code, e.Message)
	require.NotNil(t, a.Message.Message, e.Message)
	require.NotNil(t, a.Detail.Status, e.Detail)
	require.NotNil(t, a.Detail.Headers, e.Detail)
	require.Equal(t, "RL429", *a.Message.Code)
	require.Equal(t, 429, *a.Detail.Status)
	return a
}

// An httpRequest is what PostgREST tells the database of a request.
type httpRequest struct {
	method, role    string
	subject         string
	headers, claims string // in place of what follows from the others
	forwarded       string
	readOnly        bool
}

// serve makes the transaction of a request: what PostgREST sets, db-pre-request, and then a statement.
func (r httpRequest) serve(conn *pgx.Conn, statement string) error {
	ctx := context.Background()
	options := pgx.TxOptions{}
	if r.readOnly {
		options.AccessMode = pgx.ReadOnly
	}
	return pgx.BeginTxFunc(ctx, conn, options, func(tx pgx.Tx) error {
		headers, claims := map[string]string{"host": "api"}, map[string]string{"role": r.role}
		if r.forwarded != "" {
			headers["x-forwarded-for"] = r.forwarded
		}
		if r.subject != "" {
			claims["sub"] = r.subject
		}
		if r.headers == "" {
			text, _ := json.Marshal(headers)
			r.headers = string(text)
		}
		if r.claims == "" {
			text, _ := json.Marshal(claims)
			r.claims = string(text)
		}
		_, err := tx.Exec(ctx, `
			select set_config('role', $1, true), set_config('request.method', $2, true), set_config('request.headers', $3, true),
			       set_config('request.jwt.claims', $4, true)`, r.role, r.method, r.headers, r.claims)
		if err == nil {
			_, err = tx.Exec(ctx, "select ratelimit_pre_request()")
		}
		if err == nil && statement != "" {
			_, err = tx.Exec(ctx, statement)
		}
		return err
	})
}

// newAPI is a database with ratelimit_pre_request, and a connection of the role that PostgREST logs in as.
func newAPI(t *testing.T, roles ...string) (*kit.TestDB, *pgx.Conn) {
	db := kit.NewDB(t)
	kit.InstallPreRequest(t, db.DB)
	for _, role := range roles {
		db.Execute("grant execute on function ratelimit_pre_request to " + role)
	}
	return db, db.Connect(t)
}

func subjectKey(subject string) string { return fmt.Sprintf("sub:%x", sha256.Sum256([]byte(subject))) }

// A request that may write takes a token; one that may not is refused by an empty bucket only.
func TestPostgREST_BranchesOnWhatTheTransactionMayDo(t *testing.T) {
	user := kit.NewRole(t)
	kit.InParallel(t, map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral}, func(t *testing.T, durability kit.PolicyOption) {
		db, conn := newAPI(t)
		db.Execute("grant execute on function ratelimit_pre_request to " + user)
		db.DefinePolicy("api", 2, 1, time.Minute, durability)
		db.SetClock(kit.T0)
		db.Execute("insert into ratelimit.pre_request (role, policy) values ($1, 'api')", user)
		me := httpRequest{method: "POST", role: user, subject: "me"}
		key := subjectKey("me")
		for method, readOnly := range map[string]bool{"GET": true, "HEAD": true, "POST": true} {
			require.NoError(t, httpRequest{method: method, role: user, subject: "me", readOnly: readOnly}.serve(conn, ""))
		}
		require.EqualValues(t, 2, db.Left("api", key), "reading takes nothing")
		require.NoError(t, me.serve(conn, ""))
		require.NoError(t, httpRequest{method: "GET", role: user, subject: "me"}.serve(conn, ""), "of a function that may write")
		require.EqualValues(t, 0, db.Left("api", key))
		for _, readOnly := range []bool{false, true} {
			err := httpRequest{method: "POST", role: user, subject: "me", readOnly: readOnly}.serve(conn, "")
			a := postgrest(t, err)
			require.Equal(t, "rate limit exceeded", *a.Message.Message)
			require.Equal(t, "Try again in 60 seconds.", *a.Message.Hint)
			require.JSONEq(t, `{"policy": "api", "cost": 1, "remaining": 0, "retry_after": 60, "capacity": 2}`, *a.Message.Details)
			require.Equal(t, map[string]string{"Retry-After": "60", "RateLimit": `"api";r=0;t=60`, "RateLimit-Policy": `"api";q=2;w=120`}, a.Detail.Headers)
			require.NotContains(t, err.Error()+kit.PgError(err).Detail+kit.PgError(err).Where, key)
		}
		require.NoError(t, httpRequest{method: "GET", role: user, subject: "you", readOnly: true}.serve(conn, ""))
		// What was taken is given back when the request fails.
		db.Reset("api", key)
		require.Error(t, me.serve(conn, "select 1 / 0"))
		require.EqualValues(t, 2, db.Left("api", key))
		db.Execute("select ratelimit_define_policy('api', shadow => true)")
		for range 3 {
			require.NoError(t, me.serve(conn, ""))
			require.NoError(t, httpRequest{method: "GET", role: user, subject: "me", readOnly: true}.serve(conn, ""))
		}
		db.DropPolicy("api")
		require.Equal(t, "RL001", kit.SQLState(me.serve(conn, "")))
	})
}

func TestPostgREST_KeysAreSubjectsOrAddresses(t *testing.T) {
	t.Parallel()
	subjects, addresses, both, last := kit.NewRole(t), kit.NewRole(t), kit.NewRole(t), kit.NewRole(t)
	db, conn := newAPI(t, subjects, addresses, both, last)
	db.DefinePolicy("api", 1000, 1, kit.ADay)
	db.Execute(`
		insert into ratelimit.pre_request (role, policy, by_subject, forwarded_hop, refuse_without_key)
		values ($1, 'api', true, null, false), ($2, 'api', false, 2, true), ($3, 'api', true, 1, false)`, subjects, addresses, both)
	used := func() []string {
		keys := kit.Column(t, db.DB, "select key from ratelimit_status()")
		db.Execute("select ratelimit_reset('api', key) from ratelimit_status()")
		return keys
	}
	for name, test := range map[string]struct {
		request httpRequest
		key     string // empty: it passes without one
	}{
		"the subject":                   {httpRequest{role: subjects, subject: "me", forwarded: "1.2.3.4"}, subjectKey("me")},
		"a subject before an address":   {httpRequest{role: both, subject: "me", forwarded: "1.2.3.4"}, subjectKey("me")},
		"a long subject":                {httpRequest{role: both, subject: strings.Repeat("ü", 1000)}, subjectKey(strings.Repeat("ü", 1000))},
		"an empty subject":              {httpRequest{role: both, claims: `{"sub": ""}`, forwarded: "1.2.3.4"}, "ip:1.2.3.4"},
		"a subject of null":             {httpRequest{role: both, claims: `{"sub": null}`, forwarded: "1.2.3.4"}, "ip:1.2.3.4"},
		"a number":                      {httpRequest{role: both, claims: `{"sub": 42}`}, subjectKey("42")},
		"no token":                      {httpRequest{role: both, forwarded: "1.2.3.4"}, "ip:1.2.3.4"},
		"no claims":                     {httpRequest{role: both, claims: "{}", forwarded: "1.2.3.4"}, "ip:1.2.3.4"},
		"the last hop":                  {httpRequest{role: both, forwarded: "6.6.6.6, 7.7.7.7,1.2.3.4 "}, "ip:1.2.3.4"},
		"the hop before":                {httpRequest{role: addresses, subject: "me", forwarded: "6.6.6.6, 1.2.3.4, 10.0.0.1"}, "ip:1.2.3.4"},
		"a port":                        {httpRequest{role: both, forwarded: "1.2.3.4:56789"}, "ip:1.2.3.4"},
		"version 6":                     {httpRequest{role: both, forwarded: "2001:db8:1:2:3:4:5:6"}, "ip:2001:db8:1:2::/64"},
		"version 6, a neighbour":        {httpRequest{role: both, forwarded: "2001:DB8:1:2::9"}, "ip:2001:db8:1:2::/64"},
		"version 6 with brackets":       {httpRequest{role: both, forwarded: "[2001:db8:1:2::9]"}, "ip:2001:db8:1:2::/64"},
		"version 6 with a port":         {httpRequest{role: both, forwarded: "[2001:db8:1:2::9]:443"}, "ip:2001:db8:1:2::/64"},
		"version 4 in version 6":        {httpRequest{role: both, forwarded: "::ffff:1.2.3.4"}, "ip:1.2.3.4"},
		"no address":                    {httpRequest{role: both, forwarded: "unknown"}, ""},
		"an obfuscated address":         {httpRequest{role: both, forwarded: "_hidden"}, ""},
		"an empty hop":                  {httpRequest{role: both, forwarded: "1.2.3.4,"}, ""},
		"no header":                     {httpRequest{role: both}, ""},
		"no headers":                    {httpRequest{role: both, headers: "{}"}, ""},
		"no subject and no hop counts":  {httpRequest{role: subjects, forwarded: "1.2.3.4"}, ""},
		"a role without a row":          {httpRequest{role: last, subject: "me"}, ""},
		"an address with a quote in it": {httpRequest{role: both, forwarded: `1.2.3.4'); drop table x; --`}, ""},
	} {
		test.request.method = "POST"
		require.NoError(t, test.request.serve(conn, ""), name)
		require.Equal(t, test.key, strings.Join(used(), " "), name)
	}
	// Fewer hops than proxies: somebody came past them.
	for _, forwarded := range []string{"", "1.2.3.4"} {
		for _, readOnly := range []bool{false, true} {
			a := postgrest(t, httpRequest{method: "POST", role: addresses, subject: "me", forwarded: forwarded, readOnly: readOnly}.serve(conn, ""))
			require.Equal(t, "the request has no key to limit it by", *a.Message.Message)
			require.Empty(t, a.Detail.Headers)
		}
	}
	db.Execute("insert into ratelimit.pre_request (role, policy) values ('*', 'api')")
	require.NoError(t, httpRequest{method: "POST", role: last, subject: "me"}.serve(conn, ""))
	require.Equal(t, []string{subjectKey("me")}, used())
	require.NoError(t, httpRequest{method: "POST", role: addresses, forwarded: "1.2.3.4, 10.0.0.1"}.serve(conn, ""))
	require.Equal(t, []string{"ip:1.2.3.4"}, used(), "its own row goes before")
}

// Whatever raises in a request of PostgREST raises what it understands.
func TestPostgREST_DocumentsOfEveryPath(t *testing.T) {
	t.Parallel()
	user := kit.NewRole(t)
	db, conn := newAPI(t, user)
	db.SetClock(kit.T0)
	db.Guarded("odd", "orders")
	db.Execute("grant insert on orders, orders_of_sizes to " + user + "; grant execute on function ratelimit_enforce to " + user)
	db.Execute("insert into ratelimit.pre_request (role, policy) values ('*', 'pass'); select ratelimit_define_policy('pass', 1000, 1, '1 second')", pgx.QueryExecModeSimpleProtocol)
	odd := "a \"quoted\" \\ ü\r\nX-Evil: 1"
	db.Policy(odd, 10, 3, 7*kit.Second, kit.Stepped).Policy("odd", 10, 4, 7*kit.Second).Policy("budget", 10, 0, kit.Second)
	db.Execute("select ratelimit_override(p, 'plan', 5), ratelimit_override(p, 'blocked', 0) from unnest(array['odd', 'budget']) as p")
	db.Execute("select ratelimit_acquire(p, k, 4) from unnest(array['odd', 'budget', $1]) as p, unnest(array['k', 'plan', 'blocked']) as k", odd)
	request := httpRequest{method: "POST", role: user, subject: "me"}
	for _, test := range []struct {
		statement, hint, retryAfter, limit, quota string
	}{
		{"select ratelimit_enforce('odd', 'k', 7)", "Try again in 1.75 seconds.", "2", `"odd";r=6;t=2`, `"odd";q=10;w=18`},
		{"select ratelimit_enforce('odd', 'k', 11)", "A cost of 11 never fits a bucket of 10.", "", `"odd";r=6;t=2`, `"odd";q=10;w=18`},
		{"select ratelimit_enforce('odd', 'plan', 2)", "Try again in 1.75 seconds.", "2", `"odd";r=1;t=2`, `"odd";q=5`},
		{"select ratelimit_enforce('odd', 'blocked')", "A cost of 1 never fits a bucket of 0.", "", `"odd";r=0;t=1`, `"odd";q=0`},
		{"select ratelimit_enforce('budget', 'k', 7)", "The bucket will not hold so many tokens by itself.", "", `"budget";r=6`, `"budget";q=10`},
		{"select ratelimit_enforce(" + kit.Quoted(odd) + ", 'k', 7)", "Try again in 7 seconds.", "7", `"a \"quoted\" \\ ???X-Evil: 1";r=6;t=4`, `"a \"quoted\" \\ ???X-Evil: 1";q=10;w=28`},
		{"insert into orders (customer) select 'k' from generate_series(1, 7)", "Try again in 1.75 seconds.", "2", `"odd";r=6;t=2`, `"odd";q=10;w=18`},
		{"insert into orders_of_sizes (customer, size) values ('k', 7), ('a', 1)", "Try again in 1.75 seconds.", "2", `"odd";r=6;t=2`, `"odd";q=10;w=18`},
		{"insert into orders_of_sizes (customer, size) values ('k', 7), ('blocked', 1)", "A cost of 1 never fits a bucket of 0.", "", `"odd";r=0;t=1`, `"odd";q=0`},
	} {
		a := postgrest(t, request.serve(conn, test.statement))
		require.Equal(t, "rate limit exceeded", *a.Message.Message, test.statement)
		require.Equal(t, test.hint, *a.Message.Hint, test.statement)
		var numbers map[string]any
		require.NoError(t, json.Unmarshal([]byte(*a.Message.Details), &numbers), *a.Message.Details)
		require.Len(t, numbers, 5)
		want := map[string]string{"Retry-After": test.retryAfter, "RateLimit": test.limit, "RateLimit-Policy": test.quota}
		maps.DeleteFunc(want, func(_, value string) bool { return value == "" })
		require.Equal(t, want, a.Detail.Headers, test.statement)
		for _, value := range a.Detail.Headers {
			require.Regexp(t, `^[ -~]*$`, value)
		}
	}
	// Elsewhere it is the error for programs; PostgREST leaves an empty setting behind.
	kit.Execute(t, conn, "select set_config('request.method', '', false)")
	_, err := conn.Exec(t.Context(), "select ratelimit_enforce('odd', 'k', 7)")
	require.Equal(t, "RL429", kit.SQLState(err))
}

// The same fields for the programs of other languages, about any decision.
func TestHTTPFields(t *testing.T) {
	t.Parallel()
	db := kit.NewDB(t)
	db.SetClock(kit.T0)
	db.Policy("api", 10, 1, 6*time.Second)
	db.Execute("select ratelimit_define_policy('watch', 0, 1, '1 hour', shadow => true), ratelimit_define_policy('month', 9, period => '1 month')")
	db.Execute("select ratelimit_define_policy('jobs', 2, lease => '1 minute')")
	for _, test := range []struct{ decision, policy, want string }{
		{"ratelimit_acquire('api', 'k', 7, 'i')", "api", `{"RateLimit":"\"api\";r=3;t=6","RateLimit-Policy":"\"api\";q=10;w=60"}`},
		{"ratelimit_acquire('api', 'k', 7, 'i')", "api", `{"RateLimit-Policy":"\"api\";q=10;w=60"}`},
		{"ratelimit_acquire('api', 'k', 4)", "api", `{"Retry-After":"6","RateLimit":"\"api\";r=3;t=6","RateLimit-Policy":"\"api\";q=10;w=60"}`},
		{"ratelimit_acquire('api', 'k', 11)", "api", `{"RateLimit":"\"api\";r=3;t=6","RateLimit-Policy":"\"api\";q=10;w=60"}`},
		{"ratelimit_acquire('watch', 'k')", "watch", `{}`},
		{"ratelimit_acquire('month', 'k')", "month", `{"RateLimit":"\"month\";r=8;t=129600","RateLimit-Policy":"\"month\";q=9;w=2678400"}`},
		{"ratelimit_peek('jobs', 'k')", "jobs", `{"RateLimit":"\"jobs\";r=2;t=1","RateLimit-Policy":"\"jobs\";q=2"}`},
		{"ratelimit_peek('api', 'k')", "no such", `{"RateLimit":"\"no such\";r=3;t=6","RateLimit-Policy":"\"no such\";q=10"}`},
	} {
		got := kit.Column(t, db.DB, "select ratelimit_http_fields('"+test.policy+"', d)::text from "+test.decision+" as d")
		require.Equal(t, []string{test.want}, got, test.decision)
	}
	_, err := db.Pool.Exec(t.Context(), "select ratelimit_http_fields('api', null)")
	require.Equal(t, "22023", kit.SQLState(err))
}

func TestPostgREST_OnAStandby(t *testing.T) {
	t.Parallel()
	db, server := kit.NewPrivateDB(t)
	kit.InstallPreRequest(t, db.DB)
	db.Policy("durable", 2, 1, kit.ADay).Policy("ephemeral", 2, 1, kit.ADay, kit.Ephemeral)
	db.Execute("select ratelimit_acquire(p, $1, 2) from unnest('{durable,ephemeral}'::text[]) as p", subjectKey("me"))
	db.Execute("create role durable; create role ephemeral; grant execute on function ratelimit_pre_request to public", pgx.QueryExecModeSimpleProtocol)
	db.Execute("insert into ratelimit.pre_request (role, policy) values ('durable', 'durable'), ('ephemeral', 'ephemeral')")
	conn := kit.NoError(pgx.Connect(t.Context(), pgtest.Standby(t, server).URL(kit.PrivateName)))(t)
	defer conn.Close(context.WithoutCancel(t.Context()))
	read := func(role, subject string) error {
		return httpRequest{method: "GET", role: role, subject: subject, readOnly: true}.serve(conn, "")
	}
	db.Await(t, kit.Patience, "select exists (select from pg_stat_replication where replay_lsn >= pg_current_wal_lsn())")
	postgrest(t, read("durable", "me"))
	require.NoError(t, read("durable", "you"))
	require.NoError(t, read("ephemeral", "me"), "its buckets cannot be read there")
}

func TestPostgREST_InstallAndUninstall(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, stranger, favourite := kit.NewRole(t), kit.NewRole(t), kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, fmt.Sprintf(`
		create schema app authorization %[1]s;
		grant usage on schema app to public;
		grant create on database %[2]s to %[1]s;
		alter default privileges for role %[1]s grant all on functions to %[3]s, public;
		alter default privileges for role %[1]s grant all on tables to %[3]s, public`, owner, pgx.Identifier{db.Name}.Sanitize(), favourite), pgx.QueryExecModeSimpleProtocol)
	install := func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, kit.PreRequestScript(t, "install.sql"), pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			kit.Execute(t, conn, "rollback")
		}
		return err
	}
	conn := kit.ConnectAs(t, db, owner)
	require.Equal(t, "55000", kit.SQLState(install(conn)))
	kit.Execute(t, conn, "set search_path = app")
	require.NoError(t, migrations.Up(ctx, conn))
	before := kit.FingerprintOf(t, db)
	require.Equal(t, "42501", kit.SQLState(install(kit.ConnectAs(t, db, stranger))))
	conn = kit.ConnectAs(t, db, owner) // its path does not have the package
	require.NoError(t, install(conn))
	granted := (&kit.TestDB{DB: db, T: t}).Grants
	require.Empty(t, granted())
	kit.Execute(t, conn, "grant execute on function app.ratelimit_pre_request to "+stranger)
	kit.Execute(t, conn, "insert into ratelimit.pre_request values ('*', 'api')")
	require.NoError(t, install(conn))
	require.NoError(t, install(conn))
	require.Equal(t, []string{"*"}, kit.Column(t, db, "select role from ratelimit.pre_request"))
	require.Equal(t, []string{"ratelimit_pre_request to " + stranger + " f"}, granted())
	_, err := conn.Exec(ctx, "insert into ratelimit.pre_request values ('x', 'api', true, 0)")
	require.Equal(t, "23514", kit.SQLState(err))
	kit.Execute(t, conn, kit.PreRequestScript(t, "uninstall.sql"), pgx.QueryExecModeSimpleProtocol)
	kit.Execute(t, conn, kit.PreRequestScript(t, "uninstall.sql"), pgx.QueryExecModeSimpleProtocol)
	require.Equal(t, before, kit.FingerprintOf(t, db))
	// The package goes with it.
	require.NoError(t, install(conn))
	require.NoError(t, migrations.Down(ctx, conn))
	require.Empty(t, kit.Column(t, db, "select proname::text from "+kit.PackageFunctions+" as p"))
	kit.Execute(t, conn, "set search_path = app")
	require.NoError(t, migrations.Up(ctx, conn))
	require.Equal(t, before, kit.FingerprintOf(t, db))
}
