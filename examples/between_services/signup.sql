-- A trigger that enqueues a job for each new user, in the transaction that inserts the user.

CREATE TABLE users (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, email text NOT NULL);

CREATE FUNCTION welcome_user() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pgqueue.enqueue('mail.welcome', jsonb_build_object('user_id', NEW.id));
    RETURN NEW;
END
$$;

CREATE TRIGGER welcome_user AFTER INSERT ON users
FOR EACH ROW EXECUTE FUNCTION welcome_user();
